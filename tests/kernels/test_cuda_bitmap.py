"""bitmap_unpack on the GPU gives the bits that the CPU gives."""

from __future__ import annotations

import pytest
import torch

import kernels_ext

pytestmark = pytest.mark.gpu


def to_gpu(w: kernels_ext.BitmapWeight) -> kernels_ext.BitmapWeight:
    return kernels_ext.BitmapWeight(w.N, w.K, w.bitmap.cuda(), w.values.cuda(), w.row_offsets.cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (3, 7), (5, 8), (2, 2047), (2, 2048), (2, 2049), (300, 4104)])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_unpacks_every_bit(N: int, K: int, sparsity: float, dtype: torch.dtype) -> None:
    """K on both sides of a byte and of a block's 2048 columns; NaN, Inf and -0.0 are values like others."""
    dense = torch.randn(N, K) * (torch.rand(N, K) >= sparsity)
    dense.view(-1)[::5] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-6]).repeat(N * K)[
        : len(range(0, N * K, 5))
    ]
    dense = dense.to(dtype)
    weight = to_gpu(kernels_ext.bitmap_pack(dense))
    out = torch.full((N, K), 7.0, dtype=dtype, device="cuda")

    kernels_ext.bitmap_unpack(weight, out=out)

    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.cpu().view(bits), dense.view(bits))


def test_offsets_that_lie_do_not_read_past_the_row() -> None:
    """A weight that skipped validate() may give wrong numbers, never an illegal access."""
    dense = torch.ones(4, 64)
    weight = to_gpu(kernels_ext.bitmap_pack(dense))
    weight.row_offsets[1:] = torch.tensor([1, 2, 3, 4], device="cuda")
    out = kernels_ext.bitmap_unpack(weight)
    torch.cuda.synchronize()
    assert torch.equal(out.sum(dim=1).cpu(), torch.ones(4))


def test_opcheck() -> None:
    weight = to_gpu(kernels_ext.bitmap_pack(torch.randn(4, 64)))
    out = torch.empty(4, 64, device="cuda")
    torch.library.opcheck(
        torch.ops.kernels_ext.bitmap_unpack_into.default,
        (out, weight.bitmap, weight.values, weight.row_offsets),
    )
