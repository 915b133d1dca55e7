"""SparseLinear: one stored weight, the backend that dispatch names, and a report that says so."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels_ext import bitmap_pack, build_info, dispatch
from service.errors import BackendUnavailable
from service.model import linear as linear_module
from service.model.linear import Format, SparseLinear, bitmap_bytes, choose_format, require_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pruned(N: int, K: int, dtype: torch.dtype, sparsity: float = 0.6, seed: int = 0) -> torch.Tensor:
    """A random matrix with a share of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=generator)
    weight[torch.rand(N, K, generator=generator) < sparsity] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("M", [0, 1, 2, 5, 16, 33, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["bitmap", "dense"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_backend_multiplies(form: str, dtype: torch.dtype, M: int, with_bias: bool) -> None:
    """M on both sides of the crossover to dense; at most twice as wrong as torch in that dtype."""
    weight, bias = pruned(72, 200, dtype), torch.randn(72).to(dtype) if with_bias else None
    x = torch.randn(M, 200).to(dtype)
    layer = SparseLinear("l", bitmap_pack(weight) if form == "bitmap" else weight, bias, Format(form, ""))

    got = layer(x)

    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch_error = (torch.nn.functional.linear(x, weight, bias).double() - want).abs()
    allowed = 2 * float(torch_error.max()) + 1e-4 if M else 0.0
    assert got.shape == (M, 72)
    assert got.dtype == dtype
    assert M == 0 or float((got.double() - want).abs().max()) <= allowed


def test_leading_dimensions_and_strides_are_kept_outside() -> None:
    """transformers passes [batch, tokens, K], sometimes as a view."""
    weight = pruned(9, 16, torch.float32)
    layer = SparseLinear("l", bitmap_pack(weight), None, Format("bitmap", ""))
    x = torch.randn(2, 16, 3).transpose(1, 2)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=0, atol=1e-5)


def test_decompressed_products_share_one_scratch_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large M decompresses; a second layer must not hold a second dense copy."""
    monkeypatch.setattr(linear_module, "_scratch", {})
    small, large = pruned(8, 24, torch.float32, seed=1), pruned(16, 32, torch.float32, seed=2)
    layers = [SparseLinear("l", bitmap_pack(weight), None, Format("bitmap", "")) for weight in (small, large)]
    for layer, weight in zip(layers, (small, large), strict=True):
        x = torch.randn(3, weight.shape[1])
        torch.testing.assert_close(layer._product("dense")(x), x @ weight.T, rtol=0, atol=1e-5)
    assert [buffer.numel() for buffer in linear_module._scratch.values()] == [16 * 32]
    x = torch.randn(3, 24)
    torch.testing.assert_close(layers[0]._product("dense")(x), x @ small.T, rtol=0, atol=1e-5)
    assert [buffer.numel() for buffer in linear_module._scratch.values()] == [16 * 32]


def test_backend_is_what_dispatch_chooses_for_the_bucket() -> None:
    """Asked once a bucket, kept, and the same in the report."""
    weight = pruned(64, 128, torch.float32)
    layer = SparseLinear("l", bitmap_pack(weight), None, Format("bitmap", "why"))
    report = layer.report()
    for M in (1, 2, 3, 64, 1000):
        choice = dispatch.choose(
            dispatch.default_table(),
            device="cpu",
            format="bitmap",
            dtype=torch.float32,
            N=64,
            K=128,
            sparsity=layer.weight.sparsity,
            M=M,
        )
        assert layer.bind(M).backend == choice.backend
        assert report.backends[dispatch.m_bucket(M)] == choice.backend
        assert layer.bind(M) is layer.bind(M)


def test_calls_are_counted_by_backend_and_bucket() -> None:
    """What /metrics shows as layer calls."""
    layer = SparseLinear("l", pruned(8, 16, torch.float32), None, Format("dense", ""))
    for M in (1, 1, 4):
        layer(torch.randn(M, 16))
    one, four = layer.bind(1), layer.bind(4)
    assert layer.calls() == {f"{one.backend}|{one.bucket}": 2, f"{four.backend}|{four.bucket}": 1}


def test_report_counts_bytes_of_what_is_stored() -> None:
    """Bytes of the report are bytes of tensors."""
    weight = pruned(100, 333, torch.bfloat16, sparsity=0.5)
    packed = bitmap_pack(weight)
    report = SparseLinear("name", packed, None, Format("bitmap", "why")).report()
    assert report.stored_bytes == packed.stored_bytes == bitmap_bytes(100, 333, packed.nnz, 2)
    assert report.dense_bytes == 100 * 333 * 2
    assert report.sparsity == pytest.approx(1 - packed.nnz / 33300)
    assert (report.name, report.N, report.K, report.dtype, report.format, report.reason) == (
        "name",
        100,
        333,
        "bfloat16",
        "bitmap",
        "why",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_format_follows_the_bytes(dtype: torch.dtype) -> None:
    """A bitmap costs a bit an element and an offset a row: below that share of zeros dense is smaller."""
    N, K = 256, 512
    even = N * K - (N * K // 8 + 8 * (N + 1)) // dtype.itemsize
    assert choose_format(N, K, dtype, even + 1, device="cpu").name == "dense"
    assert "too low" in choose_format(N, K, dtype, even + 1, device="cpu").reason
    assert choose_format(N, K, dtype, N * K // 3, device="cpu").name == "bitmap"
    assert choose_format(N, K, dtype, 0, device="cpu").name == "bitmap"


def test_half_sparse_bf16_takes_at_most_six_tenths() -> None:
    """The promise for pruned layers, at SmolLM2-135M's sizes."""
    for N, K in ((960, 576), (576, 576), (3072, 576), (576, 1536)):
        assert bitmap_bytes(N, K, N * K // 2, 2) <= 0.60 * N * K * 2


def test_dispatch_may_veto_the_bitmap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller but slower is not a gain; the reason is dispatch's."""
    monkeypatch.setattr(
        linear_module.dispatch,
        "choose",
        lambda table, **_: dispatch.Choice("dense", "dense is measured faster"),
    )
    stored = choose_format(256, 512, torch.float32, 1000, device="cpu")
    assert stored.name == "dense"
    assert "dense is measured faster" in stored.reason


def test_dense_weights_can_be_asked_for() -> None:
    """The benchmark's baseline."""
    assert choose_format(256, 512, torch.float32, 0, device="cpu", weights="dense").name == "dense"


def test_empty_matrices_stay_dense() -> None:
    """Nothing to gain and nothing to divide by."""
    assert choose_format(0, 8, torch.float32, 0, device="cpu").name == "dense"


def test_a_bias_that_does_not_fit_is_an_error() -> None:
    """Shape and dtype, before any kernel."""
    with pytest.raises(ValueError, match=r"linear l: bias must be \[8\]"):
        SparseLinear("l", pruned(8, 16, torch.float32), torch.zeros(7), Format("dense", ""))
    with pytest.raises(ValueError, match="bfloat16"):
        SparseLinear(
            "l", pruned(8, 16, torch.float32), torch.zeros(8, dtype=torch.bfloat16), Format("dense", "")
        )


def test_cuda_without_cuda_kernels_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a silent fallback: a build for CPUs says what is missing and what to set."""
    build = dataclasses.replace(
        build_info(), cuda_built=False, cuda_loaded=False, cuda_reason="KERNELS_CUDA=OFF at build"
    )
    monkeypatch.setattr(linear_module, "build_info", lambda: build)
    with pytest.raises(
        BackendUnavailable,
        match=r"needs CUDA kernels.*KERNELS_CUDA=OFF at build.*\.KERNELS_CUDA=ON.*LACUNAR_DEVICE=cpu",
    ):
        require_device("cuda")


def test_cuda_without_kernels_for_every_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose CUDA module lacks an op of the step must not start and then fail in the first request."""
    build = dataclasses.replace(build_info(), cuda_built=True, cuda_loaded=True)
    monkeypatch.setattr(linear_module, "build_info", lambda: build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear_module, "_has_kernel", lambda op, key: op != "paged_attention")
    with pytest.raises(BackendUnavailable, match="paged_attention"):
        require_device("cuda:0")
    monkeypatch.setattr(linear_module, "_has_kernel", lambda op, key: True)
    assert require_device("cuda:0") == torch.device("cuda:0")


def test_other_devices_are_refused() -> None:
    """There are two."""
    assert require_device("cpu") == torch.device("cpu")
    with pytest.raises(BackendUnavailable, match="'mps'"):
        require_device("mps")


def test_kernels_are_found_by_device() -> None:
    """The lookup behind the refusal above."""
    assert linear_module._has_kernel("bitmap_linear", "CPU")
    assert not linear_module._has_kernel("bitmap_linear", "XPU")


def test_kernel_facts_say_why_cuda_kernels_are_missing() -> None:
    """The log and /metrics repeat these words."""
    facts = linear_module.kernel_facts()

    assert facts["cpu_isa"] == build_info().cpu_isa
    assert facts["cuda_kernels"] == ("yes" if build_info().cuda_loaded else "no")
    assert facts["cuda_reason"] == build_info().cuda_reason
