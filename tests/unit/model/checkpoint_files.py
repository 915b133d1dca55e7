"""Checkpoint directories for tests: a small model, its packed form, and safetensors files with any header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.tiny_models import NATIVE, SavedModel, save_model


def small_llama(path: Path, **options: Any) -> SavedModel:
    """Save a pruned Llama with an untied head."""
    return save_model(NATIVE["llama"](), path, **options)


def pack_matrix(dense: Tensor) -> dict[str, Tensor]:
    """The four tensors of the packed form, made the slow obvious way."""
    mask = (dense != 0).numpy()
    counts = torch.from_numpy(np.asarray(mask.sum(axis=-1), dtype=np.int64))
    offsets = (
        torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1])) if dense.dim() == 2 else None
    )
    return {
        "compressed": dense[torch.from_numpy(mask)],
        "bitmask": torch.from_numpy(np.packbits(mask, axis=-1, bitorder="little")),
        "row_offsets": offsets if offsets is not None else torch.zeros((), dtype=torch.int64),
        "shape": torch.tensor(dense.shape, dtype=torch.int64),
    }


def pack_directory(source: Path, target: Path, *, claim: dict[str, Any] | None = None) -> None:
    """Write the packed form of a saved model: every projection packed, the rest plain."""
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": value for part, value in pack_matrix(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = claim or {
        "quant_method": "lacunar",
        "format_version": 1,
        "format": "bitmask",
    }
    (target / "config.json").write_text(json.dumps(config))


def shard_directory(path: Path) -> dict[str, Any]:
    """Split model.safetensors into two shards with an index; returns the index."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, path / file)
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    write_index(path, index)
    return index


def write_index(path: Path, index: object) -> None:
    """Write the index of shards."""
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_tensors(path: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")


def edit_config(path: Path, **changes: Any) -> None:
    """Change keys of config.json; None drops one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_header(file: Path, change: Any) -> None:
    """Rewrite a safetensors header with ``change(header)``, the data as it is."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    if not isinstance(text, bytes):
        text = json.dumps(header if text is None else text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
