"""The bitmap format in slow, obvious Python: the reference for BITMAP.md, the kernels and the golden files.

It works on numpy arrays of the elements' bits (uint16 for bfloat16 and float16, uint32 for float32): the
format never looks at what the bits mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels_ext.ops import BitmapWeight

Bits = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BitmapArrays:
    """The three arrays of BITMAP.md and the matrix's shape."""

    N: int
    K: int
    bitmap: npt.NDArray[np.uint8]
    values: Bits
    row_offsets: npt.NDArray[np.int64]


def pack(dense: Bits) -> BitmapArrays:
    """Pack a ``[N, K]`` array of bits, element by element."""
    N, K = dense.shape
    bitmap = np.zeros((N, (K + 7) // 8), np.uint8)
    values = []
    row_offsets = [0]
    for n in range(N):
        for k in range(K):
            if dense[n, k] != 0:
                bitmap[n, k // 8] |= 1 << (k % 8)
                values.append(dense[n, k])
        row_offsets.append(len(values))
    return BitmapArrays(N, K, bitmap, np.array(values, dense.dtype), np.array(row_offsets, np.int64))


def unpack(packed: BitmapArrays) -> Bits:
    """The inverse of `pack`, for valid arrays."""
    dense = np.zeros((packed.N, packed.K), packed.values.dtype)
    for n in range(packed.N):
        value = packed.row_offsets[n]
        for k in range(packed.K):
            if packed.bitmap[n, k // 8] >> (k % 8) & 1:
                dense[n, k] = packed.values[value]
                value += 1
    return dense


def from_checkpoint(
    bitmask: Tensor, compressed: Tensor, row_offsets: Tensor, shape: Tensor, *, name: str
) -> BitmapWeight:
    """Build a validated weight from the four tensors of a checkpoint (BITMAP.md, "On disk").

    Args:
        bitmask: uint8 ``[N, ceil(K/8)]``.
        compressed: ``[nnz]`` float32, bfloat16 or float16.
        row_offsets: int64 ``[N]``.
        shape: int64 ``[2]``: N, K.
        name: the module, for messages.

    Raises:
        ValueError: the tensors disagree with each other or with the format; the message names the module.
    """
    if shape.dtype != torch.int64 or shape.shape != (2,):
        raise ValueError(f"{name}.shape must be int64 [2], got {shape.dtype} {list(shape.shape)}")
    N, K = (int(size) for size in shape)
    if row_offsets.dtype != torch.int64 or row_offsets.shape != (N,):
        raise ValueError(
            f"{name}.row_offsets must be int64 [{N}], got {row_offsets.dtype} {list(row_offsets.shape)}"
        )
    end = torch.tensor([compressed.numel()], dtype=torch.int64)
    try:
        return BitmapWeight(N, K, bitmask, compressed, torch.cat([row_offsets, end])).validate()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def to_checkpoint(weight: BitmapWeight) -> dict[str, Tensor]:
    """The four tensors of a checkpoint, by suffix: bitmask, compressed, row_offsets, shape."""
    return {
        "bitmask": weight.bitmap,
        "compressed": weight.values,
        "row_offsets": weight.row_offsets[:-1].clone(),
        "shape": torch.tensor([weight.N, weight.K], dtype=torch.int64),
    }
