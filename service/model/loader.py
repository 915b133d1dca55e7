"""Load a checkpoint directory into a model that the engine can run."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from service.errors import CheckpointError, SettingsError, StartupError

from .checkpoint import WEIGHT_DTYPES, Checkpoint, fault
from .decoder import NativeDecoder, common_window, make_plan, unsupported
from .interface import CausalModel, ModelSpec
from .linear import require_device
from .transformers_model import TransformersDecoder, build_empty, why_not_served
from .weights import Progress, WeightReader

_log = logging.getLogger("lacunar.model")

Implementation = Literal["auto", "native", "transformers"]
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES}


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    weights: Literal["auto", "dense"] = "auto",
    max_model_len: int | None = None,
    implementation: Implementation = "auto",
    progress: Progress | None = None,
) -> CausalModel:
    """Load a Hugging Face directory: plain safetensors (zeros and all) or the packed form.

    Peak memory is the model as stored plus one dense layer.

    Args:
        path: the directory. Never a name to download, never code to run.
        device: "cpu" or "cuda".
        dtype: "auto" (the configuration's, else the weights' own), "float32", "bfloat16" or "float16".
        weights: "auto" packs each layer that gains from it, "dense" keeps all dense.
        max_model_len: longest sequence in tokens; None for what the configuration says.
        implementation: "native", "transformers", or "auto": native where it implements the configuration in
            full.
        progress: told a stage and the share of it that is done (0..1).

    Raises:
        CheckpointError: a file is missing, truncated or inconsistent; names file, tensor, expected and found.
        StartupError: the architecture cannot be served.
        SettingsError: an argument is not allowed with this model.
        BackendUnavailable: this build has no kernels for the device.
    """
    target = require_device(device)
    with Checkpoint.open(path) as checkpoint:
        config = read_config(checkpoint)
        served_dtype = resolve_dtype(checkpoint, config, dtype)
        reason = unsupported(config)
        if implementation == "native" and reason is not None:
            raise SettingsError(
                f"implementation='native' was asked for, but {checkpoint.config_file}: {reason}"
            )
        native = reason is None and implementation != "transformers"
        architecture = (config.architectures or [config.model_type])[0]
        refusal = None if native else why_not_served(config, max_model_len)
        if refusal is not None:
            raise StartupError(f"{architecture} cannot be served: {refusal}")
        spec = make_spec(checkpoint, config, served_dtype, target, max_model_len, native)
        reader = WeightReader(
            checkpoint, dtype=served_dtype, device=target, weights=weights, progress=progress
        )
        if native:
            return NativeDecoder(spec, config, make_plan(config, checkpoint), reader)
        _log.info("%s runs through transformers: %s", spec.architecture, reason or "it was asked for")
        return TransformersDecoder(spec, build_empty(config, served_dtype), reader)


def read_config(checkpoint: Checkpoint) -> Any:
    """Make the transformers configuration of an open checkpoint, without what says how weights are stored.

    Raises:
        CheckpointError: transformers does not know the model, or a value is not what it allows.
    """
    if "model_type" not in checkpoint.config:
        raise fault(checkpoint.config_file, None, "a model_type", "none")
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # transformers raises whatever its checks raise: ValueError, KeyError, its own dataclass errors.
        raise CheckpointError(
            f"{checkpoint.config_file}: expected a model that transformers knows without remote code, found "
            f"model_type {checkpoint.config['model_type']!r}: {error}"
        ) from error
    for key in ("quantization_config", "compression_config"):
        if hasattr(config, key):
            delattr(config, key)
    return config


def resolve_dtype(checkpoint: Checkpoint, config: Any, dtype: str) -> torch.dtype:
    """Choose the dtype that is served: the asked one, else the configuration's, else the weights' own.

    Raises:
        SettingsError: it is none that the kernels have.
    """
    if dtype == "auto":
        claimed = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        if claimed is None:
            claimed = next(
                (e.dtype for e in checkpoint.entries.values() if e.dtype in WEIGHT_DTYPES), torch.float32
            )
        dtype = str(claimed).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise SettingsError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]


def make_spec(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    native: bool,
) -> ModelSpec:
    """Gather the sizes that the engine needs.

    Raises:
        SettingsError: ``max_model_len`` is more than the model has positions for, or is needed and missing.
        CheckpointError: the configuration lacks a size.
    """
    text = config.get_text_config()
    sizes = {}
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        value = getattr(text, key, None)
        if not isinstance(value, int) or value <= 0:
            raise fault(checkpoint.config_file, None, f"a positive {key}", repr(value))
        sizes[key] = value
    heads = sizes["num_attention_heads"]
    positions = getattr(text, "max_position_embeddings", None)
    if max_model_len is None:
        max_model_len = positions
    if max_model_len is None:
        raise SettingsError(
            f"{checkpoint.config_file} has no max_position_embeddings: max_model_len must be given"
        )
    if max_model_len < 1 or (positions is not None and max_model_len > positions):
        raise SettingsError(
            f"max_model_len must be at least 1 and at most {positions} (max_position_embeddings of "
            f"{checkpoint.config_file}), got {max_model_len}"
        )
    return ModelSpec(
        architecture=(config.architectures or [config.model_type])[0],
        implementation="native" if native else "transformers",
        vocab_size=sizes["vocab_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or sizes["hidden_size"] // heads,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        # Cut-down models keep the ids of the full one; what is never generated ends nothing.
        eos_token_ids=tuple(
            token for token in _eos_token_ids(checkpoint, text) if token < sizes["vocab_size"]
        ),
        window=common_window(config) if native else None,
    )


def _eos_token_ids(checkpoint: Checkpoint, config: Any) -> tuple[int, ...]:
    """End-of-sequence tokens: generation_config.json's where it has any, as transformers' generate does."""
    eos = None
    with contextlib.suppress(FileNotFoundError):
        file = checkpoint.path / "generation_config.json"
        try:
            eos = json.loads(file.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise fault(file, None, "a JSON object", f"{error}") from error
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise fault(checkpoint.config_file, None, "eos_token_id as a token id or a list of them", repr(eos))
    return tuple(ids)
