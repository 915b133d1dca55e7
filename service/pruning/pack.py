"""Convert between ordinary safetensors with zeros and the packed portable form, without loss.

The form is specified in kernels_ext/formats/BITMAP.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kernels_ext import bitmap_pack

from .checkpoint import (
    Checkpoint,
    TensorEntry,
    new_directory,
    packed_entries,
    refuse_existing,
    write_checkpoint,
)
from .progress import Progress, no_progress
from .prune import WEIGHT_DTYPES

# Matrices of numbered blocks are the decoder's; embeddings and the output head have no number in their names.
_IN_A_BLOCK = re.compile(r"\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What was packed or unpacked: module names, and the bytes of these weights in both forms."""

    modules: list[str]
    dense_bytes: int
    stored_bytes: int


def write_packed(model: Path, out: Path, progress: Progress = no_progress) -> PackReport:
    """Pack every decoder matrix of `model` that gets smaller by it; `out` holds the same values.

    Which matrices gain is found from their zeros, whatever the config claims. Everything else is copied.

    Args:
        model: a Hugging Face directory with safetensors.
        out: a directory that does not exist; it appears complete or not at all.
        progress: called with "pack" and the share of the matrices done.

    Raises:
        CheckpointError: `model` cannot be read.
        FileExistsError: `out` exists.
        ValueError: no matrix would get smaller.
    """
    refuse_existing(out)
    checkpoint = Checkpoint(model)
    total = sum(len(names) for names in checkpoint.shards.values())
    modules: list[str] = []
    dense_bytes = stored_bytes = seen = 0

    def entries_of(name: str) -> list[TensorEntry]:
        nonlocal dense_bytes, stored_bytes, seen
        progress("pack", seen / total)
        seen += 1
        module = name.removesuffix(".weight")
        entry = checkpoint.entry(name)
        if module in checkpoint.packed_modules or not _may_be_packed(entry):
            return checkpoint.stored(name)
        packed = bitmap_pack(entry.load())
        if packed.stored_bytes >= entry.nbytes:
            return [entry]
        modules.append(module)
        dense_bytes += entry.nbytes
        stored_bytes += packed.stored_bytes
        return packed_entries(module, packed)

    with new_directory(out) as directory:
        write_checkpoint(checkpoint, directory, entries_of, lambda _: None)
        if not modules and not checkpoint.packed_modules:
            raise ValueError(
                f"{model}: no matrix of a decoder layer has enough zeros to get smaller by packing "
                "(1/16 of the weights in 16 bits, 1/32 in float32); prune it first"
            )
    progress("pack", 1.0)
    return PackReport(modules=modules, dense_bytes=dense_bytes, stored_bytes=stored_bytes)


def unpack(model: Path, out: Path, progress: Progress = no_progress) -> PackReport:
    """Write a packed `model` as ordinary safetensors with zeros, which any reader of safetensors understands.

    Args, errors: as `write_packed`; ValueError when `model` holds nothing packed.
    """
    refuse_existing(out)
    checkpoint = Checkpoint(model)
    if not checkpoint.packed_modules:
        raise ValueError(f"{model}: holds no packed weight")
    total = sum(len(names) for names in checkpoint.shards.values())
    seen = 0

    def entries_of(name: str) -> list[TensorEntry]:
        nonlocal seen
        progress("unpack", seen / total)
        seen += 1
        return [checkpoint.entry(name)]

    modules = sorted(checkpoint.packed_modules)
    with new_directory(out) as directory:
        write_checkpoint(checkpoint, directory, entries_of, lambda _: None)
    progress("unpack", 1.0)
    return PackReport(
        modules=modules,
        dense_bytes=sum(checkpoint.entry(f"{module}.weight").nbytes for module in modules),
        stored_bytes=sum(
            entry.nbytes for module in modules for entry in checkpoint.stored(f"{module}.weight")
        ),
    )


def _may_be_packed(entry: TensorEntry) -> bool:
    return (
        len(entry.shape) == 2
        and entry.dtype in WEIGHT_DTYPES
        and entry.name.endswith(".weight")
        and _IN_A_BLOCK.search(entry.name) is not None
    )
