"""A pytest plug-in: runs vLLM's HTTP tests against Lacunar, without vLLM.

It stands in for `tests.utils.RemoteOpenAIServer` (starts `lacunar serve` under the model name of the test,
with the flags that have a counterpart) and for `vllm.tokenizers.get_tokenizer` (the served model's). Whatever
else a test file imports from vLLM is a name that raises NotApplicable when a test uses it, and a test that
starts no server is not applicable: it is about vLLM's Python classes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from lacunar_server import Server
from suite_results import NotApplicable

MAX_CONTEXT = 1024

_running = False

# vLLM's flag -> ours; None where it means nothing here and the test does not depend on it.
_FLAGS: dict[str, str | None] = {
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-num-sequences",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--block-size": "--kv-block-size",
    "--dtype": "--dtype",
    "--api-key": "--api-key",
    "--tool-call-parser": "--tool-format",
    "--port": "--port",
    "--gpu-memory-utilization": None,
    "--structured-outputs-config.backend": None,
    "--reasoning-parser": None,  # the served model does not reason
    "--lora-modules": None,
    "--max-lora-rank": None,
    "--max-cpu-loras": None,
    "--max-logprobs": None,
    "--tokenizer": None,
}
_SWITCHES: dict[str, str | None] = {
    "--no-enable-prefix-caching": "--no-enable-prefix-caching",
    "--enable-prefix-caching": "--enable-prefix-caching",
    "--enforce-eager": None,
    "--enable-prompt-tokens-details": None,  # always on
    "--enable-auto-tool-choice": None,  # always on
    "--enable-chunked-prefill": None,  # always on
    "--enable-lora": None,  # tests of the base model run; those of an adapter get 404
    "--enable-server-load-tracking": None,  # always on
    "--enable-request-id-headers": None,  # always on
    "--enable-tokenizer-info-endpoint": None,
    "--enable-per-request-metrics": None,
    "--disable-frontend-multiprocessing": None,
    "--trust-remote-code": None,
}
_VALUES = {"half": "float16", "bfloat16": "bfloat16", "float32": "float32", "auto": "auto"}


def our_flags(arguments: Sequence[str]) -> list[str]:
    """Our flags for vLLM's. Raises NotApplicable for one without a counterpart."""
    flags: list[str] = []
    rest = list(arguments)
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if name in _SWITCHES:
            ours: str | None = _SWITCHES[name]
            flags += [ours] if ours else []
            continue
        if name == "--lora-modules":
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        if name not in _FLAGS:
            raise NotApplicable(
                f"the test starts its server with {name}, for which this one has no counterpart"
            )
        value = value or rest.pop(0)
        ours = _FLAGS[name]
        if ours == "--dtype":
            value = _VALUES[value]
        if ours == "--max-model-len":
            # Answers without a limit fill the context, which takes a CPU minutes at 8192 tokens.
            value = str(min(int(value), MAX_CONTEXT))
        if ours:
            flags += [ours, value]
    return flags


class RemoteOpenAIServer:
    """What the tests use of vLLM's class of this name."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        flags = our_flags(vllm_serve_args)
        port = None
        if "--port" in flags:
            place = flags.index("--port")
            port = int(flags[place + 1])
            del flags[place : place + 2]
        key = (env_dict or {}).get("VLLM_API_KEY")
        if key:
            flags += ["--api-key", key]
        flags += [
            "--served-model-name",
            model,
            "--seed",
            str(seed or 0),
            "--threads",
            os.environ["SUITE_THREADS"],
        ]
        # CPU memory is shared with the other runs on the machine; vLLM's tests need a small cache.
        flags += ["--kv-cache-bytes", str(2**29)]
        self._server = Server(flags, log=Path(os.environ["SUITE_LOG"]), port=port)
        self._server.wait_until_ready()
        self.host, self.port = "127.0.0.1", self._server.port
        self.proc = self._server.process

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        status = self._server.stop()
        assert status == 0, f"the server ended with status {status}"

    @property
    def url_root(self) -> str:
        """Without a slash at the end."""
        return self._server.url

    def url_for(self, *parts: str) -> str:
        """The address of a path."""
        return self.url_root + "/" + "/".join(parts)

    def get_client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        options.setdefault("timeout", 600)
        options.setdefault("api_key", self.DUMMY_API_KEY)
        return openai.OpenAI(base_url=self.url_for("v1"), max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The official client, asynchronous."""
        options.setdefault("timeout", 600)
        options.setdefault("api_key", self.DUMMY_API_KEY)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), max_retries=0, **options)


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """The served model's tokenizer, whatever name the test asks for."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["LACUNAR_MODEL"])


class _Downloads:
    def snapshot_download(self, *_: Any, **__: Any) -> str:
        """A path for `--lora-modules`, which is not passed on."""
        return "/nonexistent"


class _Absent:
    """A name of vLLM's Python code. Using it while the file is read gives another; a test may not use it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _use(self, *_: Any, **__: Any) -> Any:
        if _running:
            raise NotApplicable(f"the test uses vLLM's own Python code ({self._name})")
        return self

    __call__ = __getitem__ = __or__ = __ror__ = __add__ = _use

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")._use()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__path__" or not name.startswith("__"):
            if name.endswith(("Error", "Exception")):
                return type(name, (Exception,), {})
            return [] if name == "__path__" else _Absent(f"{self.__name__}.{name}")
        raise AttributeError(name)


_KNOWN: dict[str, dict[str, Any]] = {
    "tests.utils": {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "ROCM_ENV_OVERRIDES": {},
    },
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Downloads},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name in ("tests.utils", "tests.conftest") or name.partition(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _AbsentModule(spec.name)
        vars(module).update(_KNOWN.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def _starts_server(function: Callable[..., Any]) -> bool:
    try:
        return "RemoteOpenAIServer(" in inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _running
    _running = True
    assert isinstance(item, pytest.Function)
    functions = [item.function]
    for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
        functions += [definition.func for definition in definitions]
    if not any(map(_starts_server, functions)):
        raise NotApplicable("the test is about vLLM's own Python classes and sends nothing over HTTP")


def pytest_runtest_teardown() -> None:
    global _running
    _running = False
