"""Convert between ordinary safetensors with zeros and the packed portable form, without loss; check both.

The form is specified in kernels_ext/formats/BITMAP.md. Any form that the reader knows can be packed and
unpacked; what is written is always plain tensors or Lacunar's own form, with a digest of each tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels_ext import bitmap_pack
from service.errors import CheckpointError
from service.model.checkpoint import WEIGHT_DTYPES, Checkpoint, Entry, TensorEntry
from service.model.weights import drop_negative_zeros

from .progress import Progress, no_progress
from .writer import (
    PendingTensor,
    as_dense,
    as_packed,
    as_stored,
    new_directory,
    refuse_existing,
    write_checkpoint,
)

# Matrices of numbered blocks are the decoder's; embeddings and the output head have no number in their names.
_IN_A_BLOCK = re.compile(r"\.\d+\.")


@dataclass(kw_only=True)
class PackReport:
    """What was packed or unpacked: module names, and the bytes of these weights in both forms.

    `negative_zeros` counts the -0.0 that packing turned into +0.0.
    """

    modules: list[str] = field(default_factory=list)
    dense_bytes: int = 0
    stored_bytes: int = 0
    negative_zeros: int = 0


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Tensors read, stored tensors compared with a digest, and elements compared with another model."""

    tensors: int
    with_digest: int
    compared_elements: int
    only_sign_of_zero: int


def pack(
    model: Path, out: Path, progress: Progress = no_progress, *, keep_negative_zeros: bool = False
) -> PackReport:
    """Pack every decoder matrix of `model` that gets smaller by it; `out` holds the same values.

    Which matrices gain is found from their zeros, whatever the config claims. Everything else is written
    dense. A -0.0 in a matrix becomes +0.0 unless it is to be kept: pruning by a mask leaves one for every
    negative weight, and a stored value for each would undo the gain.

    Args:
        model: a Hugging Face directory with safetensors, in any form that the reader knows.
        out: a directory that does not exist; it appears complete or not at all.
        progress: called with "pack" and the share of the tensors done.
        keep_negative_zeros: store -0.0 as a value, so that unpacking gives back every bit.

    Raises:
        CheckpointError: `model` cannot be read.
        FileExistsError: `out` exists.
        ValueError: no matrix would get smaller.
    """
    refuse_existing(out)
    report = PackReport()
    with Checkpoint.open(model) as checkpoint, new_directory(out) as directory:
        seen = 0

        def tensors_of(name: str) -> list[PendingTensor]:
            nonlocal seen
            progress("pack", seen / len(checkpoint.entries))
            seen += 1
            return packed_or_dense(checkpoint, checkpoint.entries[name], report, keep_negative_zeros)

        write_checkpoint(checkpoint, directory, tensors_of, lambda _: None)
        if not report.modules:
            raise ValueError(
                f"{model}: no matrix of a decoder layer has enough zeros to get smaller by packing "
                "(1/16 of the weights in 16 bits, 1/32 in float32); prune it first"
            )
    progress("pack", 1.0)
    return report


def unpack(model: Path, out: Path, progress: Progress = no_progress) -> PackReport:
    """Write a packed `model` as ordinary safetensors with zeros, which any reader of safetensors understands.

    Args, errors: as `pack`; ValueError when `model` holds plain tensors only.
    """
    refuse_existing(out)
    report = PackReport()
    with Checkpoint.open(model) as checkpoint:
        packed = [entry for entry in checkpoint.entries.values() if not isinstance(entry, TensorEntry)]
        if not packed:
            raise ValueError(f"{model}: holds no packed weight")
        with new_directory(out) as directory:
            seen = 0

            def tensors_of(name: str) -> list[PendingTensor]:
                nonlocal seen
                progress("unpack", seen / len(checkpoint.entries))
                seen += 1
                return [as_dense(checkpoint, checkpoint.entries[name])]

            write_checkpoint(checkpoint, directory, tensors_of, lambda _: None)
        for entry in packed:
            report.modules.append(entry.name.removesuffix(".weight"))
            report.dense_bytes += as_dense(checkpoint, entry).nbytes
            report.stored_bytes += checkpoint.nbytes(entry)
    report.modules.sort()
    progress("unpack", 1.0)
    return report


def verify(model: Path, progress: Progress = no_progress, *, against: Path | None = None) -> VerifyReport:
    """Read every tensor of a model once: structure, digests, and on request the values of another model.

    Args:
        model: a directory in any form that the reader knows.
        progress: called with "verify" and the share of the tensors done.
        against: a model that must hold the same tensors; the sign of a zero may differ, nothing else.

    Raises:
        CheckpointError: something is damaged or differs; the message names file and tensor.
    """
    with Checkpoint.open(model) as checkpoint:
        total = len(checkpoint.entries)
        for done, entry in enumerate(checkpoint.entries.values()):
            progress("verify", done / total)
            if isinstance(entry, TensorEntry):
                checkpoint.read_small(entry)
            else:
                for _ in checkpoint.rows(entry, entry.dtype):
                    pass
        parts = [part for entry in checkpoint.entries.values() for part in entry.parts]
        compared = signs = 0
        if against is not None:
            compared, signs = _compare(checkpoint, against)
    progress("verify", 1.0)
    return VerifyReport(
        tensors=total,
        with_digest=sum(bool(part.digest) for part in parts),
        compared_elements=compared,
        only_sign_of_zero=signs,
    )


def packed_or_dense(
    checkpoint: Checkpoint, entry: Entry, report: PackReport, keep_negative_zeros: bool = False
) -> list[PendingTensor]:
    """One tensor as `pack` writes it; a packed one is noted in the report."""
    if not _may_be_packed(entry):
        return (
            as_stored(checkpoint, entry) if isinstance(entry, TensorEntry) else [as_dense(checkpoint, entry)]
        )
    dense = checkpoint.read(entry)
    if not keep_negative_zeros:
        report.negative_zeros += drop_negative_zeros(dense)
    packed = bitmap_pack(dense)
    if packed.stored_bytes >= dense.nbytes:
        return [as_dense(checkpoint, entry)]
    module = entry.name.removesuffix(".weight")
    report.modules.append(module)
    report.dense_bytes += dense.nbytes
    report.stored_bytes += packed.stored_bytes
    return as_packed(module, packed)


def _may_be_packed(entry: Entry) -> bool:
    return (
        len(entry.shape) == 2
        and entry.dtype in WEIGHT_DTYPES
        and entry.name.endswith(".weight")
        and _IN_A_BLOCK.search(entry.name) is not None
    )


def _compare(checkpoint: Checkpoint, against: Path) -> tuple[int, int]:
    """Elements compared, and how many differ in the sign of a zero only."""
    compared = signs = 0
    with Checkpoint.open(against) as other:
        if checkpoint.entries.keys() != other.entries.keys():
            name = sorted(checkpoint.entries.keys() ^ other.entries.keys())[0]
            holder = checkpoint if name in checkpoint.entries else other
            raise CheckpointError(f"tensor {name}: expected in both models, found in {holder.path} only")
        for name, entry in checkpoint.entries.items():
            twin = other.entries[name]
            if entry.shape != twin.shape or entry.dtype != twin.dtype:
                raise CheckpointError(
                    f"{entry.file}: tensor {name}: expected {twin.dtype} {list(twin.shape)} as in "
                    f"{twin.file}, found {entry.dtype} {list(entry.shape)}"
                )
            ours, theirs = checkpoint.read(entry), other.read(twin)
            differ = _bytes_differ(ours, theirs)
            if bool(differ.any()):
                zeros = differ & (ours.reshape(-1) == 0) & (theirs.reshape(-1) == 0)
                if not torch.equal(zeros, differ):
                    index = int(torch.nonzero(differ & ~zeros)[0])
                    raise CheckpointError(
                        f"{entry.file}: tensor {name}: expected the values of {twin.file}, found others "
                        f"({int((differ & ~zeros).sum())} of {differ.numel()}; first at element {index}: "
                        f"{ours.reshape(-1)[index].item()} for {theirs.reshape(-1)[index].item()})"
                    )
                signs += int(zeros.sum())
            compared += differ.numel()
    return compared, signs


def _bytes_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements differ in any bit, flattened."""
    size = a.dtype.itemsize
    return (a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).view(-1, size).any(dim=1)
