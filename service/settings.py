"""The server's settings, from the command line, LACUNAR_* variables and a TOML file.

A value given in several places is taken from the first of: command line flag, environment variable, TOML file
(`--config FILE` or LACUNAR_CONFIG), default. Every setting has the same name in all of them:
`max_queue` in the file, LACUNAR_MAX_QUEUE in the environment, `--max-queue` as a flag. A name that does not
exist is an error wherever it stands.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from service.engine.config import EngineConfig
from service.errors import SettingsError

PREFIX = "LACUNAR_"
CONFIG_VARIABLE = "LACUNAR_CONFIG"

_FILE_VALUES = "_file_values"

# A CPU computes a step of 256 tokens in about the time that others may wait for it (see EngineConfig); a GPU
# needs some thousand tokens to be busy.
_DEFAULT_STEP_TOKENS = {"cpu": 256, "cuda": 2048}

PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """All settings of `lacunar serve`; immutable. Build one with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=False, protected_namespaces=()
    )

    model: Path = Field(description="Directory of the checkpoint to serve.")
    served_model_name: str | None = Field(
        None, min_length=1, description="Name clients use for the model; default: the directory's name."
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for /metrics and /openapi.json, which then leave the main one; health is on both.",
    )
    api_key: SecretStr | None = Field(
        None,
        description="Clients must send it as `Authorization: Bearer KEY`; several are parted by commas. "
        "Health and metrics stay open.",
    )
    api_key_file: Path | None = Field(
        None, description="File with further API keys, one a line; lines that begin with # are left out."
    )
    cors_origins: str | None = Field(
        None,
        min_length=1,
        description="Origins whose pages may use the server, parted by commas; * for all. Default: none.",
    )
    tls_certificate: Path | None = Field(None, description="PEM file with the certificate chain, for HTTPS.")
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    max_body_bytes: PositiveInt = Field(4 * 1024 * 1024, description="Largest request body.")
    max_header_bytes: PositiveInt = Field(64 * 1024, description="Longest request line and headers together.")
    max_connections: PositiveInt = Field(4096, description="Connections that may be open at once.")
    max_request_tokens: PositiveInt = Field(
        4 * 1024 * 1024, description="Most tokens that all choices of one request may have together."
    )
    body_seconds: PositiveSeconds = Field(
        60.0, description="A request's body must have arrived within this time."
    )
    request_seconds: PositiveSeconds = Field(
        3600.0, description="An answer must be complete within this time; else it ends with an error."
    )
    max_choices: PositiveInt = Field(
        128, description="Most choices that one request may ask for: prompts times n."
    )
    keep_alive_seconds: PositiveInt = Field(
        75, description="An idle connection is closed after this; longer than a load balancer's 60."
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="After SIGTERM open requests may run on for this long.",
    )
    stall_seconds: PositiveSeconds = Field(
        120.0, description="/livez fails when the engine has been silent for this long."
    )
    gpu_sample_seconds: PositiveSeconds = Field(
        0.1,
        description="Between two samples of the GPUs' clocks and power; memory is read each second.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")
    log_format: Literal["text", "json"] = Field("text", description="Log lines as text or as JSON objects.")
    status_page: bool = Field(True, description="Show a page about the server at /, where /metrics is too.")
    metrics_alias: Literal["none", "vllm"] = Field(
        "none",
        description="vllm: /metrics also has vLLM's names, for routers and dashboards.",
    )
    access_log: bool = Field(True, description="Log one line for each request (never its text).")
    log_bodies: bool = Field(
        False, description="Also log the first 2000 characters of request bodies, prompts included."
    )

    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Where the model runs: cpu, cuda or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and activations; auto: the checkpoint's."
    )
    weights: Literal["auto", "dense"] = Field(
        "auto", description="auto keeps pruned layers compressed where that pays; dense expands them all."
    )
    implementation: Literal["auto", "native", "transformers"] = Field(
        "auto", description="Whose forward pass runs; auto: native where the architecture is known."
    )
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "none"] = Field(
        "auto",
        description="How the model writes tool calls; auto: as its chat template shows; none: not read.",
    )
    max_model_len: PositiveInt | None = Field(
        None, description="Longest sequence (prompt and output) in tokens; default: the model's own limit."
    )
    max_num_sequences: PositiveInt = Field(64, description="Sequences that run at once.")
    max_step_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of one engine step; longer prompts are computed in chunks, and sequences that "
        "decode wait for each. Default: 256 on a CPU, 2048 on a GPU.",
    )
    max_queue: int = Field(256, ge=0, description="Sequences that may wait; more are answered with 429.")
    kv_block_size: PositiveInt = Field(16, description="Tokens in one block of the KV cache.")
    kv_cache_bytes: PositiveInt | None = Field(
        None, description="Size of the KV cache; default: from the memory that is free after loading."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory that model, KV cache and all else may take."
    )
    cuda_graphs: bool = Field(True, description="Capture decode steps on a GPU at start and replay them.")
    enable_prefix_caching: bool = Field(
        True, description="Reuse the KV blocks of a prompt's beginning that was seen before."
    )
    seed: int | None = Field(
        None, ge=0, le=2**63 - 1, description="For requests without a seed; default: from the system."
    )
    threads: PositiveInt | None = Field(
        None, description="CPU threads of one operation; default: the physical cores."
    )

    @field_validator("api_key")
    @classmethod
    def _usable_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None:
            for text in key.get_secret_value().split(","):
                _check_key(text)
        return key

    @model_validator(mode="after")
    def _tls_needs_both(self) -> Settings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key are only of use together")
        return self

    def api_keys(self) -> frozenset[str]:
        """The keys from `api_key` and `api_key_file`; none means that the server is open.

        Raises:
            SettingsError: the file cannot be read, or a line is no key.
        """
        keys = [] if self.api_key is None else self.api_key.get_secret_value().split(",")
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(
                    f"{self.api_key_file}: the API keys cannot be read: {error}", param="api_key_file"
                ) from error
            for number, line in enumerate(lines, 1):
                text = line.strip()
                if not text or text.startswith("#"):
                    continue
                try:
                    keys.append(_check_key(text))
                except ValueError as error:
                    raise SettingsError(
                        f"{self.api_key_file}, line {number}: {error}", param="api_key_file"
                    ) from error
            if not keys:
                # An empty file would open the server to everyone.
                raise SettingsError(f"{self.api_key_file} has no API key", param="api_key_file")
        return frozenset(keys)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file. No .env file is read: it would be a fourth place."""
        assert isinstance(init_settings, InitSettingsSource)
        flags = dict(init_settings.init_kwargs)
        file_values = flags.pop(_FILE_VALUES, {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=flags),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=file_values),
        )

    @property
    def model_name(self) -> str:
        """The name in /v1/models and in requests."""
        return self.served_model_name or self.model.resolve().name

    def engine_config(self) -> EngineConfig:
        """What the engine process is started with.

        Raises:
            SettingsError: values that do not fit together.
        """
        return EngineConfig(
            model=str(self.model),
            device=self.device,
            dtype=self.dtype,
            weights=self.weights,
            implementation=self.implementation,
            max_model_len=self.max_model_len,
            max_num_sequences=self.max_num_sequences,
            max_step_tokens=self.max_step_tokens
            or _DEFAULT_STEP_TOKENS["cuda" if self.device.startswith("cuda") else "cpu"],
            max_queue=self.max_queue,
            kv_block_size=self.kv_block_size,
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            cuda_graphs=self.cuda_graphs,
            enable_prefix_caching=self.enable_prefix_caching,
            seed=self.seed,
            threads=self.threads,
            log_format=self.log_format,
        )


def _check_key(text: str) -> str:
    if not text or not text.isascii() or any(c.isspace() or c == "," for c in text):
        raise ValueError("an API key is one or more ASCII characters without spaces and commas")
    return text


def load_settings(flags: Mapping[str, Any], config_file: Path | None = None) -> Settings:
    """Collect the settings from all places and check them.

    Args:
        flags: values from the command line by setting name; None stands for a flag that was not given.
        config_file: `--config`; None takes LACUNAR_CONFIG, if set.

    Raises:
        SettingsError: a name is unknown, a value is not allowed, or the file cannot be read. The message
            names the flag, the variable or the file and key.
    """
    _reject_unknown_variables(os.environ)
    given = {name: value for name, value in flags.items() if value is not None}
    if config_file is None and (variable := os.environ.get(CONFIG_VARIABLE)):
        config_file = Path(variable)
    file_values = {} if config_file is None else _read_file(config_file)
    try:
        # The file's values travel as an argument that settings_customise_sources takes out again.
        return Settings(**{**given, _FILE_VALUES: file_values})
    except ValidationError as error:
        raise SettingsError(_describe(error, given, config_file)) from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: the settings file cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a valid TOML file: {error}") from error
    for name in values:
        if name not in Settings.model_fields:
            raise SettingsError(f"{path}: unknown setting {name!r}{_suggest(name)}")
    return values


def _reject_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {PREFIX + name.upper(): name for name in Settings.model_fields}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known or variable == CONFIG_VARIABLE:
            continue
        # Kubernetes sets such variables in every pod beside a Service called "lacunar".
        if variable.startswith((PREFIX + "SERVICE_", PREFIX + "PORT_")):
            raise SettingsError(
                f"{variable} is no setting; it looks like one of the variables that Kubernetes adds for a "
                "Service called 'lacunar'. Set enableServiceLinks: false in the pod's specification"
            )
        suggestion = _suggest(variable.removeprefix(PREFIX).lower(), PREFIX)
        raise SettingsError(f"unknown environment variable {variable}{suggestion}")


def _suggest(name: str, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, Settings.model_fields, n=1)
    if not close:
        return "; `lacunar serve --help` lists the settings"
    return f"; did you mean {prefix + close[0].upper() if prefix else close[0]}?"


def _describe(error: ValidationError, given: Mapping[str, Any], config_file: Path | None) -> str:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        variable = PREFIX + name.upper()
        if problem["type"] == "missing":
            lines.append(f"{name} is not set: give it as an argument, as {variable} or in the settings file")
            continue
        if name in given:
            where = f"--{name.replace('_', '-')}" if name != "model" else "MODEL"
        elif variable in os.environ:
            where = variable
        else:
            where = f"{config_file}: {name}"
        value = "" if name == "api_key" else f" (got {problem['input']!r})"
        reason = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{where}: {reason[0].lower()}{reason[1:]}{value}")
    return "; ".join(lines)
