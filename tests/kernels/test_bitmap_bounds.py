"""No kernel reads or writes outside its arrays: they are placed against pages that may not be touched.

A stray access kills the process, so the work runs in a child, and the test reads how the child ended.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels_ext
from kernels_ext import BitmapWeight, bitmap_linear, bitmap_pack, bitmap_unpack, dense_linear

PAGE = mmap.PAGESIZE
PROT_NONE = 0


class GuardedMemory:
    """Hands out tensors that end, or begin, exactly at a page that may not be touched."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._maps: list[mmap.mmap] = []

    def place(self, tensor: Tensor, at_end: bool) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        pages = (size + PAGE - 1) // PAGE
        block = mmap.mmap(-1, (pages + 2) * PAGE)
        self._maps.append(block)
        start = ctypes.addressof(ctypes.c_char.from_buffer(block))
        for guard in (start, start + (pages + 1) * PAGE):
            if self._libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect failed")
        if size == 0:
            return tensor
        offset = PAGE + (pages * PAGE - size if at_end else 0)
        placed = torch.frombuffer(block, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        placed.copy_(tensor.flatten())
        return placed.view(tensor.shape)


def cases() -> Iterator[tuple[int, int, float]]:
    for K in (1, 7, 8, 9, 31, 33, 63, 64, 65, 200):
        for N in (1, 3, 5):
            for sparsity in (0.0, 0.5, 1.0):
                yield N, K, sparsity


def run_everything(isa: str, dtype: torch.dtype, at_end: bool) -> None:
    """Every kernel of one instruction set, with each array against a guard page."""
    memory = GuardedMemory()
    generator = torch.Generator().manual_seed(11)
    for N, K, sparsity in cases():
        dense = torch.randn(N, K, generator=generator)
        dense = dense.masked_fill(torch.rand(N, K, generator=generator) < sparsity, 0.0).to(dtype)
        guarded = memory.place(dense, at_end)
        packed = bitmap_pack(guarded, isa)
        weight = BitmapWeight(
            N,
            K,
            memory.place(packed.bitmap, at_end),
            memory.place(packed.values, at_end),
            memory.place(packed.row_offsets, at_end),
        ).validate()
        out = memory.place(torch.zeros_like(dense), at_end)
        assert torch.equal(bitmap_unpack(weight, out=out, isa=isa), dense)
        bias = memory.place(torch.ones(N, dtype=dtype), at_end)
        for M in (1, 3, 9):
            x = memory.place(torch.randn(M, K, generator=generator).to(dtype), at_end)
            assert torch.equal(
                bitmap_linear(x, weight, bias, isa), bitmap_linear(x.clone(), packed, bias, isa)
            )
            assert torch.equal(dense_linear(x, guarded, bias, isa), dense_linear(x.clone(), dense, bias, isa))


def run_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(kernels_ext.__file__).parents[1],
        env={"PYTHONPATH": str(Path(kernels_ext.__file__).parents[1]), "OMP_NUM_THREADS": "2"},
        check=False,
    )


@pytest.mark.parametrize("place", ["end", "begin"])
def test_kernels_stay_inside_their_arrays(place: str) -> None:
    """Vector loads near the end of the values are the risk; 100% sparse matrices have no values at all."""
    child = run_child(place)
    assert child.returncode == 0, (
        f"child ended with {child.returncode} after {child.stdout!r}: {child.stderr[-2000:]}"
    )


def test_the_guard_pages_do_guard() -> None:
    """A test that cannot fail proves nothing: reading one element too many must kill the child."""
    assert run_child("overread").returncode < 0


if __name__ == "__main__":
    (place,) = sys.argv[1:]
    if place == "overread":
        last = GuardedMemory().place(torch.ones(8), at_end=True)
        ctypes.string_at(last.data_ptr(), 8 * 4 + 1)
    else:
        for isa in kernels_ext.available_isas():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                print(isa, dtype, flush=True)
                run_everything(isa, dtype, at_end=place == "end")
