"""The 2:4 CUDA kernels: the same bytes as the reference, the same product as float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels_ext import semi_structured
from kernels_ext.formats import semi_structured as reference
from kernels_ext.semi_structured import SemiStructuredPlan, SemiStructuredWeight

pytestmark = pytest.mark.gpu(capability=(9, 0))

DTYPES = (torch.float16, torch.bfloat16)


def pruned(N: int, K: int, dtype: torch.dtype, *, share: float = 0.0, seed: int = 0) -> Tensor:
    """Two of four kept, then a share of those zeroed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    quads = torch.randn(N, -(-K // 4), 4, generator=generator, device="cuda") * 0.05
    place = torch.rand(quads.shape, generator=generator, device="cuda").argsort(-1).argsort(-1)
    keep = (place < 2) & (torch.rand(quads.shape, generator=generator, device="cuda") >= share)
    return (quads * keep).view(N, -1)[:, :K].to(dtype).contiguous() + 0.0


def activations(M: int, K: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """M rows that lie in front of NaN, so that reading past them shows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.full((M * K + 4096,), float("nan"), device="cuda", dtype=dtype)
    x[: M * K] = torch.randn(M * K, generator=generator, device="cuda").to(dtype)
    return x[: M * K].view(M, K)


def poisoned_workspace(*plans: SemiStructuredPlan) -> Tensor:
    """Partial sums are NaN: a kernel that reads what it did not write shows."""
    size = max(plan.workspace_bytes(64) for plan in plans)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    workspace[semi_structured.COUNTER_BYTES :] = 0xFF
    return workspace


def assert_product(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, *, context: str = "") -> None:
    """At most twice as wrong as a dense matmul of the same type is."""
    want = x.double() @ w.double().T
    dense = x @ w.T
    if bias is not None:
        want += bias.double()
        dense += bias
    allowed = 2 * (dense.double() - want).abs().max().item() + 1e-5
    wrong = (y.double() - want).abs()
    assert not y.isnan().any(), f"{context}: {int(y.isnan().sum())} of {y.numel()} are NaN"
    assert wrong.max().item() <= allowed, f"{context}: off by {wrong.max().item():.3g}, allowed {allowed:.3g}"


def plans(weight: SemiStructuredWeight, M: int) -> list[SemiStructuredPlan]:
    """One part and several, parts left empty, x at once and in phases, rings deeper than there are groups."""
    out = [weight.plan(M)]
    for k_slices, strips_per_block, warps, k_warps, x_groups, ring_slots in (
        (1, 1, 1, 1, 1, 1),
        (1, 3, 4, 2, 2, 3),
        (3, 5, 2, 1, 1, 2),
        (2, 7, 6, 3, 1, 4),
        (4, 2, 8, 4, 2, 2),
    ):
        plan = SemiStructuredPlan(
            N=weight.N,
            K=weight.K,
            k_slices=k_slices,
            strips_per_block=strips_per_block,
            warps=warps,
            k_warps=k_warps,
            x_groups=x_groups,
            ring_slots=ring_slots,
        )
        if plan.shared_bytes(M) <= 227 * 1024:
            out.append(plan)
    return out


@pytest.mark.parametrize(("N", "K"), [(1, 1), (31, 127), (33, 129), (96, 512)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_packs_the_same_bytes_as_the_reference(N: int, K: int, share: float) -> None:
    w = pruned(N, K, torch.float16, share=share)
    w[0, :4] = 0
    w[0, :1] = float("nan")
    w[w == 0] *= -1  # zeros of either sign
    packed = semi_structured.semi_structured_pack(w).validate()
    want = reference.pack(w.view(torch.int16).cpu().numpy().view(np.uint16))
    np.testing.assert_array_equal(packed.data.cpu().numpy(), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (31, 127), (70, 1000), (1000, 4104)])
def test_unpacks_every_bit(N: int, K: int, dtype: torch.dtype) -> None:
    w = pruned(N, K, dtype, share=0.2)
    w[0, :4] = 0
    w[0, :1] = float("inf")
    got = torch.full_like(w, float("nan"))
    semi_structured.semi_structured_unpack(semi_structured.semi_structured_pack(w), out=got)
    assert torch.equal(got.view(torch.int16), w.view(torch.int16))


def test_a_matrix_that_is_not_2_4_is_refused() -> None:
    w = pruned(64, 256, torch.float16)
    w[3, 4:7] = 1
    with pytest.raises(ValueError, match="1 groups of four"):
        semi_structured.semi_structured_pack(w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (31, 127), (33, 129), (1024, 2048), (1000, 4104), (333, 1001)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_linear_matches_float64(N: int, K: int, share: float, M: int, dtype: torch.dtype) -> None:
    """A sparse kernel may be at most twice as wrong as the dense one is."""
    w = pruned(N, K, dtype, share=share)
    x = activations(M, K, dtype)
    weight = semi_structured.semi_structured_pack(w)
    for plan in plans(weight, M):
        y = semi_structured.semi_structured_linear(x, weight, poisoned_workspace(plan), plan=plan)
        assert_product(y, x, w, context=f"M={M} {plan}")


@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (4096, 14336), (28672, 4096), (8192, 28672)])
@pytest.mark.parametrize("M", [1, 16, 32, 64])
def test_linear_of_a_real_layer(N: int, K: int, M: int) -> None:
    """The plans that the model picks for layers that fill the device."""
    w = pruned(N, K, torch.float16)
    x = activations(M, K, torch.float16)
    weight = semi_structured.semi_structured_pack(w)
    y = semi_structured.semi_structured_linear(x, weight, poisoned_workspace(weight.plan(M)))
    assert_product(y, x, w, context=f"{weight.plan(M)}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added_before_rounding(dtype: torch.dtype) -> None:
    w, x = pruned(1000, 2048, dtype), activations(5, 2048, dtype)
    bias = torch.randn(1000, device="cuda").to(dtype)
    weight = semi_structured.semi_structured_pack(w)
    y = semi_structured.semi_structured_linear(x, weight, poisoned_workspace(weight.plan(5)), bias)
    assert_product(y, x, w, bias)


def test_unaligned_x_is_read_element_by_element() -> None:
    """A view that starts 2 bytes off a 16-byte boundary is contiguous all the same."""
    x = activations(3, 1024, torch.float16)
    shifted = torch.empty(3 * 1024 + 1, dtype=torch.float16, device="cuda")[1:].view(3, 1024).copy_(x)
    weight = semi_structured.semi_structured_pack(pruned(256, 1024, torch.float16))
    workspace = poisoned_workspace(weight.plan(3))
    y = semi_structured.semi_structured_linear(shifted, weight, workspace)
    assert torch.equal(y, semi_structured.semi_structured_linear(x, weight, workspace))


def test_no_tokens_give_no_rows() -> None:
    weight = semi_structured.semi_structured_pack(pruned(256, 1024, torch.float16))
    x = torch.empty(0, 1024, dtype=torch.float16, device="cuda")
    workspace = semi_structured.semi_structured_workspace(weight)
    assert semi_structured.semi_structured_linear(x, weight, workspace).shape == (0, 256)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("M", [16, 64])
def test_repeats_are_bit_identical(M: int, overlap: bool) -> None:
    """Split sums are added in a fixed order, whichever warp arrives last."""
    weight = semi_structured.semi_structured_pack(pruned(2048, 4096, torch.float16))
    x = activations(M, 4096, torch.float16)
    workspace = poisoned_workspace(weight.plan(M))
    first = semi_structured.semi_structured_linear(x, weight, workspace, overlap_launch=overlap)
    for _ in range(50):
        again = semi_structured.semi_structured_linear(x, weight, workspace, overlap_launch=overlap)
        assert torch.equal(first, again)
    assert not workspace[: semi_structured.COUNTER_BYTES].any(), "counters must be zero between launches"


def test_a_chain_in_a_cuda_graph() -> None:
    """Launches that overlap, share one workspace and depend on each other, replayed on new input."""
    weights = [
        semi_structured.semi_structured_pack(pruned(2048, 2048, torch.bfloat16, seed=s)) for s in range(4)
    ]
    workspace = semi_structured.semi_structured_workspace(*weights)
    x = activations(4, 2048, torch.bfloat16).clone()

    def chain() -> Tensor:
        h = x
        for weight in weights:
            h = semi_structured.semi_structured_linear(h, weight, workspace)
        return h

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in range(3):
        x.copy_(activations(4, 2048, torch.bfloat16, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, chain())
        assert out.abs().sum().item() > 0


def test_opcheck() -> None:
    """Schemas, fake kernels and mutation declarations of every op."""
    w = pruned(96, 512, torch.float16)
    weight = semi_structured.semi_structured_pack(w)
    ops = torch.ops.kernels_ext
    workspace = semi_structured.semi_structured_workspace(weight)
    x = activations(3, 512, torch.float16).clone()
    for op, arguments in (
        (ops.semi_structured_pack, (w.view(torch.int16),)),
        (ops.semi_structured_unpack_into, (torch.zeros_like(w).view(torch.int16), weight.data)),
        (ops.semi_structured_linear, (x, weight.data, None, workspace, weight.plan(3).numbers)),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x[:, :-1].contiguous(), w), "K=512"),
        (lambda x, w: (torch.zeros(65, 512, dtype=x.dtype, device="cuda"), w), "at most 64"),
        (lambda x, w: (x.bfloat16(), w), "float16"),
        (lambda x, w: (x, w[:-1]), "workspace has"),
    ],
)
def test_bad_arguments_are_refused(change, message: str) -> None:
    weight = semi_structured.semi_structured_pack(pruned(256, 512, torch.float16))
    needed = weight.plan(3).workspace_bytes(3)
    workspace = torch.zeros(needed, dtype=torch.uint8, device="cuda")
    x, workspace = change(activations(3, 512, torch.float16), workspace)
    with pytest.raises(ValueError, match=message):
        semi_structured.semi_structured_linear(x, weight, workspace)


@pytest.mark.parametrize("M", [1, 8, 13, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cusparselt_matches_float64(M: int, dtype: torch.dtype) -> None:
    if not torch.backends.cusparselt.is_available():
        pytest.skip("this torch has no cuSPARSELt")
    w, x = pruned(1024, 2048, dtype), activations(M, 2048, dtype)
    weight = semi_structured.cusparselt_pack(w)
    weight.search(x)
    assert_product(semi_structured.cusparselt_linear(x, weight), x, w)
