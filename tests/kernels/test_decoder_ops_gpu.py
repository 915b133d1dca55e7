"""The decoder ops' CUDA kernels, against the formulas of their docstrings in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from kernels_ext import decoder_ops
from tests.kernels.decoder_reference import (
    DTYPES,
    Batch,
    angles,
    assert_close,
    llama_rms_norm,
    normal,
    rotate,
)

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1234)


# --- norms and activation -----------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("T", [0, 1, 40])
@pytest.mark.parametrize("H", [1, 3, 31, 33, 576, 4096, 4100, 20000])
def test_rms_norm_matches_float64(dtype: torch.dtype, T: int, H: int, rng: torch.Generator) -> None:
    """Rows that a warp, a block's registers and neither hold; with and without whole vectors."""
    x, weight = normal(rng, T, H, dtype=dtype), normal(rng, H, dtype=dtype)
    wide = x.double()
    want = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    got = decoder_ops.rms_norm(x.cuda(), weight.cuda(), 1e-5)

    assert got.dtype == dtype
    assert_close(got.cpu(), want, factor=2)


@dtypes
@pytest.mark.parametrize("T", [0, 1, 40])
@pytest.mark.parametrize("H", [1, 17, 576, 4096, 20000])
def test_add_rms_norm_is_addition_then_norm(dtype: torch.dtype, T: int, H: int, rng: torch.Generator) -> None:
    x, residual = normal(rng, T, H, dtype=dtype).cuda(), normal(rng, T, H, dtype=dtype).cuda()
    weight = normal(rng, H, dtype=dtype).cuda()
    total = residual + x
    want = decoder_ops.rms_norm(total, weight, 1e-5)

    got = decoder_ops.add_rms_norm(x, residual, weight, 1e-5)

    assert torch.equal(residual, total)
    assert torch.equal(got, want)


def test_rms_norm_of_an_unaligned_row(rng: torch.Generator) -> None:
    """A view that starts in the middle of a vector."""
    memory = normal(rng, 2 * 64 + 1).cuda()
    x = memory[1:].view(2, 64)
    weight = normal(rng, 64).cuda()

    assert torch.equal(decoder_ops.rms_norm(x, weight, 1e-5), decoder_ops.rms_norm(x.clone(), weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_before_the_weight(dtype: torch.dtype, rng: torch.Generator) -> None:
    """As transformers does; the sum of squares may differ in its last bit."""
    x, weight = normal(rng, 64, 576, dtype=dtype), normal(rng, 576, dtype=dtype)

    got = decoder_ops.rms_norm(x.cuda(), weight.cuda(), 1e-5).cpu()

    assert (got == llama_rms_norm(x, weight, 1e-5)).double().mean() > 0.999


@dtypes
@pytest.mark.parametrize("T", [0, 1, 40])
@pytest.mark.parametrize("F", [0, 1, 15, 16, 1536, 14336])
def test_silu_mul_matches_float64(dtype: torch.dtype, T: int, F: int, rng: torch.Generator) -> None:
    gate_up = (normal(rng, T, 2 * F) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)

    got = decoder_ops.silu_mul(gate_up.cuda())

    assert_close(got.cpu(), gate * torch.sigmoid(gate) * up, factor=2)


# --- rope_kv_write ------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("D", "R"), [(64, 64), (80, 80), (128, 128), (256, 256), (80, 32), (10, 6), (64, 0)])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_kv_write_matches_float64(
    dtype: torch.dtype, D: int, R: int, norms: bool, rng: torch.Generator
) -> None:
    T, Hq, Hkv, blocks, block_size, P = 7, 6, 2, 5, 4, 50
    qkv = normal(rng, T, (Hq + 2 * Hkv) * D, dtype=dtype)
    cos, sin = angles(P, R)
    positions = torch.randint(0, P, (T,), generator=rng)
    slots = torch.randperm(blocks * block_size, generator=rng)[:T]
    k_cache = normal(rng, blocks, block_size, Hkv, D, dtype=dtype)
    v_cache = normal(rng, blocks, block_size, Hkv, D, dtype=dtype)
    weights = [normal(rng, D, dtype=dtype) if norms else None for _ in range(2)]
    q, k, v = qkv.view(T, Hq + 2 * Hkv, D).split([Hq, Hkv, Hkv], dim=1)
    if weights[0] is not None and weights[1] is not None:
        q, k = llama_rms_norm(q, weights[0], 1e-6), llama_rms_norm(k, weights[1], 1e-6)
    # Whatever is not written must stay as it is.
    want_k, want_v = k_cache.double().view(-1, Hkv, D), v_cache.clone().view(-1, Hkv, D)
    want_k[slots], want_v[slots] = rotate(k, cos[positions], sin[positions]), v
    device_k, device_v = k_cache.cuda(), v_cache.cuda()

    got = decoder_ops.rope_kv_write(
        *(t.cuda() for t in (qkv, cos, sin, positions, slots)),
        device_k,
        device_v,
        Hq,
        *(None if w is None else w.cuda() for w in weights),
        1e-6,
    )

    factor = 4 if norms else 1
    assert_close(got.cpu(), rotate(q, cos[positions], sin[positions]), factor)
    assert_close(device_k.cpu().view(-1, Hkv, D), want_k, factor)
    assert torch.equal(device_v.cpu().view(-1, Hkv, D), want_v)


# --- paged_attention ----------------------------------------------------------------------------------------


def assert_attention(batch: Batch, factor: float = 2) -> None:
    """Right, and the same bits when repeated."""
    device = batch.to("cuda")
    got = device.run()

    assert_close(got.cpu(), batch.reference(), factor)
    assert torch.equal(device.run(), got)


@dtypes
@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 600, 5000])
def test_decode_matches_float64(dtype: torch.dtype, context: int, rng: torch.Generator) -> None:
    """Contexts on and beside the edges of chunks (16) and of what a block's warps take together (64)."""
    assert_attention(Batch.make(rng, [1], [context], dtype=dtype))


@dtypes
@pytest.mark.parametrize("D", [1, 8, 64, 72, 80, 96, 128, 160, 256, 320])
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (4, 4), (9, 3), (8, 1), (7, 1), (20, 1), (40, 2)])
def test_any_head_size_and_group(dtype: torch.dtype, D: int, Hq: int, Hkv: int, rng: torch.Generator) -> None:
    assert_attention(Batch.make(rng, [1, 5, 1], [70, 9, 33], Hq=Hq, Hkv=Hkv, D=D, dtype=dtype))


@dtypes
@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64, 100])
def test_mixed_batch_matches_float64(dtype: torch.dtype, block_size: int, rng: torch.Generator) -> None:
    """Decoding sequences, a whole prompt, a chunk of a longer one, and a sequence without queries."""
    batch = Batch.make(rng, [1, 40, 0, 20, 1], [300, 40, 7, 290, 1], dtype=dtype, block_size=block_size)

    assert_attention(batch)


@dtypes
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 300, 10_000, 2**62])
def test_window_matches_float64(dtype: torch.dtype, window: int, rng: torch.Generator) -> None:
    """Blocks wholly before every window may have been freed: their entries are impossible here."""
    assert_attention(Batch.make(rng, [1, 30, 9], [300, 30, 270], dtype=dtype, window=window))


@dtypes
@pytest.mark.parametrize("sequences", [2, 31, 32, 33, 70, 200])
def test_many_sequences(dtype: torch.dtype, sequences: int, rng: torch.Generator) -> None:
    """More than a warp looks at in one go."""
    contexts = torch.randint(1, 200, (sequences,), generator=rng).tolist()

    assert_attention(Batch.make(rng, [1] * sequences, contexts, Hq=8, Hkv=2, dtype=dtype))


@dtypes
def test_as_many_tokens_as_sequences_but_not_one_each(dtype: torch.dtype, rng: torch.Generator) -> None:
    """The sizes are those of a decode step; the rows of one sequence are more than a tile's."""
    batch = Batch.make(rng, [0, 12, 0, 0, 1, *([0] * 8)], [3, 40, 0, 9, 80, *([0] * 8)], Hq=8, dtype=dtype)

    assert_attention(batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_and_chunked_prefill_of_a_long_prompt(dtype: torch.dtype, rng: torch.Generator) -> None:
    whole = Batch.make(rng, [700], [900], Hq=8, Hkv=2, D=128, dtype=dtype)
    edges = [0, 1, 2, 17, 64, 66, 300, 699, 700]

    assert_attention(whole)
    for first, last in itertools.pairwise(edges):
        assert_attention(whole.only(0, first, last))


@dtypes
def test_large_scores_do_not_overflow(dtype: torch.dtype, rng: torch.Generator) -> None:
    batch = Batch.make(rng, [2], [300], dtype=dtype)
    batch.q *= 300

    assert_attention(batch, factor=20)


@dtypes
def test_nan_query_gives_nan_for_that_token_only(dtype: torch.dtype, rng: torch.Generator) -> None:
    batch = Batch.make(rng, [4], [40], dtype=dtype)
    batch.q[2] = math.nan

    got = batch.to("cuda").run()

    assert got.isnan().all(dim=1).tolist() == [False, False, True, False]
    assert not got[[0, 1, 3]].isnan().any()


@dtypes
def test_infinite_value_stays_in_its_sequence(dtype: torch.dtype, rng: torch.Generator) -> None:
    batch = Batch.make(rng, [20, 20], [100, 100], dtype=dtype)
    batch.v_cache[batch.block_tables[0, 90 // 16], 90 % 16] = math.inf

    got = batch.to("cuda").run()

    assert got[20:].isfinite().all()


def test_no_tokens_and_no_sequences(rng: torch.Generator) -> None:
    assert Batch.make(rng, [], []).to("cuda").run().shape == (0, 6 * 64)
    assert Batch.make(rng, [0, 0], [5, 0]).to("cuda").run().shape == (0, 6 * 64)


# --- graphs and torch.library -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_captured_step_follows_its_inputs(dtype: torch.dtype, rng: torch.Generator) -> None:
    """A graph is captured once and replayed with other positions, slots, tables and contexts."""
    Hq, Hkv, D, blocks = 8, 2, 64, 40
    first = Batch.make(rng, [1] * 4, [5, 100, 17, 64], Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, spare_blocks=blocks)
    second = Batch.make(rng, [1] * 4, [99, 3, 16, 111], Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, spare_blocks=blocks)
    columns = max(first.block_tables.shape[1], second.block_tables.shape[1])
    weight = normal(rng, Hq * D, dtype=dtype).cuda()
    caches = [torch.zeros(60, 16, Hkv, D, dtype=dtype, device="cuda") for _ in range(2)]
    x = torch.empty(4, (Hq + 2 * Hkv) * D, dtype=dtype, device="cuda")
    residual = torch.empty(4, Hq * D, dtype=dtype, device="cuda")
    tables = torch.zeros(4, columns, dtype=torch.int32, device="cuda")
    lens = torch.ones(4, dtype=torch.int32, device="cuda")
    starts = torch.arange(5, dtype=torch.int32, device="cuda")
    positions, slots = (torch.arange(4, device="cuda") for _ in range(2))
    cos, sin = (t.cuda() for t in angles(200, D))

    def step() -> Tensor:
        q = decoder_ops.rope_kv_write(x, cos, sin, positions, slots, caches[0], caches[1], Hq)
        y = decoder_ops.paged_attention(q, caches[0], caches[1], tables, starts, lens, D**-0.5)
        return decoder_ops.silu_mul(decoder_ops.add_rms_norm(y, residual, weight, 1e-5))

    def fill(batch: Batch, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for target in (x, residual):
            target.copy_(torch.randn(target.shape, generator=generator, device="cuda").to(dtype))
        for cache, source in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
            cache.zero_()
            cache[: source.shape[0]] = source.nan_to_num().cuda()
        used = batch.block_tables.clamp(min=0).cuda()
        tables.zero_()
        tables[:, : used.shape[1]] = used
        lens.copy_(batch.context_lens)
        positions.copy_(lens - 1)
        slots.copy_(tables.gather(1, (positions // 16)[:, None])[:, 0] * 16 + positions % 16)

    fill(first, 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed, batch in ((2, second), (3, first)):
        fill(batch, seed)
        graph.replay()
        replayed = captured.clone()
        fill(batch, seed)
        assert torch.equal(replayed, step())


@dtypes
def test_opcheck(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Schemas, mutation annotations and fake kernels agree with what the ops do."""
    ops = torch.ops.kernels_ext
    batch = Batch.make(rng, [1, 3], [20, 5], dtype=dtype).to("cuda")
    x, weight = torch.randn(3, 8, dtype=dtype).cuda(), torch.randn(8, dtype=dtype).cuda()
    caches = [torch.zeros(2, 4, 1, 8, dtype=dtype).cuda() for _ in range(2)]
    indices = [torch.arange(3).cuda() for _ in range(2)]
    qkv = torch.randn(3, 40, dtype=dtype).cuda()

    opcheck(ops.rms_norm.default, (x, weight, 1e-5))
    opcheck(ops.add_rms_norm.default, (x, torch.randn_like(x), weight, 1e-5))
    opcheck(ops.silu_mul.default, (x,))
    opcheck(ops.rope_kv_write.default, (qkv, *(t.cuda() for t in angles(4, 8)), *indices, *caches, 3))
    attention = (batch.q, batch.k_cache.nan_to_num(), batch.v_cache.nan_to_num(), batch.block_tables)
    opcheck(ops.paged_attention.default, (*attention, batch.query_start, batch.context_lens, 0.1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: decoder_ops.rms_norm(x, w.cpu(), 1e-5), "rms_norm: weight must be on cuda:0"),
        (lambda x, w: decoder_ops.rms_norm(x, w, 1e-5, isa="generic"), "rms_norm: isa chooses among"),
        (lambda x, w: decoder_ops.rms_norm(x.t(), w, 1e-5), "rms_norm: x must be contiguous"),
        (
            lambda x, w: decoder_ops.silu_mul(x.double()),
            "silu_mul: gate_up must be float32, bfloat16",
        ),
    ],
)
def test_refusals(call: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(torch.zeros(2, 8, device="cuda"), torch.zeros(8, device="cuda"))
