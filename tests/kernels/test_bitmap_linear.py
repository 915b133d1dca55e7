"""Bitmap and dense linear kernels against float64, at every edge and in every instruction set there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_at_most_twice_as_wrong
from torch import Tensor
from torch.library import opcheck

import kernels_ext
from kernels_ext import bitmap_linear, bitmap_pack, dense_linear

isas = pytest.mark.parametrize("isa", kernels_ext.available_isas())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])

Linear = Callable[..., Tensor]


def bitmap(x: Tensor, w: Tensor, bias: Tensor | None = None, isa: str | None = None) -> Tensor:
    return bitmap_linear(x, bitmap_pack(w), bias, isa)


kernels = pytest.mark.parametrize("linear", [bitmap, dense_linear])


@kernels
@isas
@dtypes
@pytest.mark.parametrize("N", [0, 1, 3, 4, 5, 9])
def test_linear_matches_float64_at_every_edge(
    N: int, dtype: torch.dtype, isa: str, linear: Linear, matrices
) -> None:
    """Row groups, blocks of 64 columns, bytes and tiles of 8 tokens end on and beside every edge."""
    for K in (0, 1, 7, 8, 9, 63, 64, 65, 200):
        w = matrices.pruned(N, K, 0.5, dtype)
        bias = matrices.activations(1, N, dtype)[0]
        for M in (0, 1, 2, 3, 4, 5, 8, 9, 17):
            x = matrices.activations(M, K, dtype)
            want = F.linear(x.double(), w.double(), bias.double())

            got = linear(x, w, bias, isa=isa)

            dense = F.linear(x, w, bias)
            assert_at_most_twice_as_wrong(got, dense, want, f"{M=} {N=} {K=} {dtype} {isa}")


@kernels
@isas
@dtypes
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_linear_matches_float64_at_real_sizes(
    sparsity: float, dtype: torch.dtype, isa: str, linear: Linear, matrices
) -> None:
    """Large enough for several threads, and rows long enough for rounding to matter."""
    for M, N, K in ((1, 960, 576), (2, 72, 1536), (7, 200, 576), (40, 64, 576)):
        w = matrices.pruned(N, K, sparsity, dtype)
        x = matrices.activations(M, K, dtype)
        want = x.double() @ w.double().T

        got = linear(x, w, isa=isa)

        assert_at_most_twice_as_wrong(got, F.linear(x, w), want, f"{M=} {N=} {K=} {dtype} {isa}")


@kernels
@isas
@dtypes
def test_uneven_rows_are_kept_apart(dtype: torch.dtype, isa: str, linear: Linear, matrices) -> None:
    """Full rows beside empty ones, and one full column: the rows of a group run out at different times."""
    w = matrices.pruned(23, 130, 0.0, dtype)
    w[1::3] = 0
    w[2::3, 70:] = 0
    w[:, 77] = 1
    x = matrices.activations(3, 130, dtype)
    want = x.double() @ w.double().T
    assert_at_most_twice_as_wrong(linear(x, w, isa=isa), F.linear(x, w), want, f"{dtype} {isa}")


@kernels
@isas
@dtypes
def test_inf_and_nan_spread_as_in_a_dense_product(dtype: torch.dtype, isa: str, linear: Linear) -> None:
    """A zero weight times Inf is NaN: a kernel that skipped zeros would hide a broken activation."""
    w = torch.zeros(3, 70, dtype=dtype)
    w[1, 5] = 2
    w[2, 6] = float("inf")
    x = torch.ones(1, 70, dtype=dtype)
    assert linear(x, w, isa=isa).tolist() == [[0, 2, float("inf")]]
    x[0, 5] = float("inf")
    y = linear(x, w, isa=isa)[0]
    assert y.isnan().tolist() == [True, False, True]
    assert y[1] == float("inf")


@isas
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_multiplied_exactly(dtype: torch.dtype, isa: str) -> None:
    """Times one and summed with zeros, each value must come back: decoding and rounding are exact."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    w = values.reshape(-1, 1)
    x = torch.ones(1, 1, dtype=dtype)
    for got in (bitmap(x, w, isa=isa)[0], dense_linear(x, w, isa=isa)[0]):
        assert torch.equal(got.isnan(), values.isnan())
        number = ~values.isnan()
        assert torch.equal(got[number], values[number])


@isas
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_to_nearest_even(dtype: torch.dtype, isa: str) -> None:
    """As torch rounds float32, at ties, at overflow and among subnormals."""
    spread = torch.randn(4000, generator=torch.Generator().manual_seed(3)) * torch.logspace(-42, 38, 4000)
    halves = torch.tensor(
        [1 + 2.0**-9, 1 + 3 * 2.0**-9, 1 + 2.0**-12, 65519.0, 65520.0, 3e38, 2.0**-25, 2.0**-26]
    )
    wanted = torch.cat([spread, halves, -halves])
    # Exact in float32 as a sum of three products of 16-bit numbers.
    parts = []
    rest = wanted.clone()
    for _ in range(3):
        part = rest.to(dtype)
        part[part.isinf()] = 0
        parts.append(part)
        rest = rest - part.float()
    w = torch.stack(parts, 1)
    exact = w.float().sum(1)
    got = dense_linear(torch.ones(1, 3, dtype=dtype), w, isa=isa)[0]
    assert torch.equal(got, exact.to(dtype))


def test_instruction_sets_are_ordered_and_named() -> None:
    isas_here = kernels_ext.available_isas()
    assert isas_here[0] == kernels_ext.cpu_isa()
    assert isas_here[-1] == "generic"


@pytest.mark.parametrize(
    ("x", "bias", "isa", "message"),
    [
        (torch.zeros(2, 5), None, None, "x has shape .2, 5., but the weight has K=6"),
        (torch.zeros(6), None, None, r"x has shape \(6,\), but the weight has K=6"),
        (torch.zeros(2, 6).bfloat16(), None, None, "x is torch.bfloat16, but the weight is torch.float32"),
        (torch.zeros(6, 2).T, None, None, "x must be contiguous"),
        (torch.zeros(2, 6), torch.zeros(4), None, r"bias must be \[3\] torch.float32"),
        (torch.zeros(2, 6), torch.zeros(3).half(), None, "bias must be"),
        (torch.zeros(2, 6), None, "sse", "isa must be one of generic, avx2, avx512"),
    ],
)
def test_wrong_arguments_are_refused(x: Tensor, bias: Tensor | None, isa: str | None, message: str) -> None:
    w = torch.ones(3, 6)
    with pytest.raises(ValueError, match=f"bitmap_linear: {message}" if isa is None else message):
        bitmap_linear(x, bitmap_pack(w), bias, isa)
    with pytest.raises(ValueError, match=f"dense_linear: {message}" if isa is None else message):
        dense_linear(x, w, bias, isa)


def test_ops_are_registered_correctly(matrices) -> None:
    w = matrices.pruned(9, 70, 0.5, torch.bfloat16)
    x = matrices.activations(2, 70, torch.bfloat16)
    bias = matrices.activations(1, 9, torch.bfloat16)[0]
    p = bitmap_pack(w)
    ops = torch.ops.kernels_ext
    for b in (None, bias):
        opcheck(ops.bitmap_linear.default, (x, p.bitmap, p.values, p.row_offsets, b))
        opcheck(ops.dense_linear.default, (x, w, b))


def test_ops_run_under_torch_compile(matrices) -> None:
    """One graph, no break, also when M changes. The eager backend keeps the compiler out of the test."""
    w = matrices.pruned(9, 70, 0.5, torch.float32)
    p = bitmap_pack(w)

    def step(x: Tensor) -> Tensor:
        y = torch.ops.kernels_ext.bitmap_linear(x, p.bitmap, p.values, p.row_offsets)
        return F.silu(y) + torch.ops.kernels_ext.dense_linear(x, w)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (1, 2, 5):
        x = matrices.activations(M, 70, torch.float32)
        assert torch.equal(compiled(x), step(x))
