"""The ops around a decoder step's linears, against the formulas of their docstrings in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import kernels_ext
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

isas = pytest.mark.parametrize("isa", kernels_ext.available_isas())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1234)


# --- rms_norm -----------------------------------------------------------------------------------------------


@isas
@dtypes
@pytest.mark.parametrize("T", [0, 1, 40])
@pytest.mark.parametrize("H", [1, 3, 4, 15, 16, 17, 33, 576])
def test_rms_norm_matches_float64(isa: str, dtype: torch.dtype, T: int, H: int, rng: torch.Generator) -> None:
    x, weight = normal(rng, T, H, dtype=dtype), normal(rng, H, dtype=dtype)
    wide = x.double()
    want = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    got = decoder_ops.rms_norm(x, weight, 1e-5, isa=isa)

    assert got.shape == (T, H)
    assert got.dtype == dtype
    assert_close(got, want, factor=2)


@isas
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_before_the_weight(isa: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Rounding after the weight instead would differ from transformers in many places.

    The sum of squares may differ in its last bit, which moves a value across a rounding boundary once in
    thousands of times.
    """
    x, weight = normal(rng, 64, 576, dtype=dtype), normal(rng, 576, dtype=dtype)

    got = decoder_ops.rms_norm(x, weight, 1e-5, isa=isa)

    same = (got == llama_rms_norm(x, weight, 1e-5)).double().mean()
    assert same > 0.999


@isas
@dtypes
def test_rms_norm_of_zeros_is_zero(isa: str, dtype: torch.dtype) -> None:
    got = decoder_ops.rms_norm(torch.zeros(2, 33, dtype=dtype), torch.ones(33, dtype=dtype), 1e-6, isa=isa)

    assert torch.equal(got, torch.zeros(2, 33, dtype=dtype))


@isas
@dtypes
@pytest.mark.parametrize("T", [0, 1, 40])
@pytest.mark.parametrize("H", [1, 16, 17, 576])
def test_add_rms_norm_is_addition_then_norm(
    isa: str, dtype: torch.dtype, T: int, H: int, rng: torch.Generator
) -> None:
    x, residual = normal(rng, T, H, dtype=dtype), normal(rng, T, H, dtype=dtype)
    weight = normal(rng, H, dtype=dtype)
    total = residual + x
    want = decoder_ops.rms_norm(total, weight, 1e-5, isa=isa)

    got = decoder_ops.add_rms_norm(x, residual, weight, 1e-5, isa=isa)

    assert torch.equal(residual, total)
    assert torch.equal(got, want)


# --- silu_mul -----------------------------------------------------------------------------------------------


@isas
@dtypes
@pytest.mark.parametrize("T", [0, 1, 40])
@pytest.mark.parametrize("F", [0, 1, 15, 16, 17, 1536])
def test_silu_mul_matches_float64(isa: str, dtype: torch.dtype, T: int, F: int, rng: torch.Generator) -> None:
    gate_up = (normal(rng, T, 2 * F) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)

    got = decoder_ops.silu_mul(gate_up, isa=isa)

    assert got.shape == (T, F)
    assert_close(got, gate * torch.sigmoid(gate) * up, factor=2)


@isas
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_mul_rounds_like_two_operations(isa: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    gate_up = normal(rng, 64, 1000, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)

    got = decoder_ops.silu_mul(gate_up, isa=isa)

    same = (got == torch.nn.functional.silu(gate) * up).double().mean()
    assert same > 0.999


@isas
def test_silu_mul_of_extreme_gates(isa: str) -> None:
    """exp must neither overflow into NaN nor stop short: silu(-1e30) is 0, not -1e30 by the largest float."""
    gate = torch.tensor([-math.inf, -1e30, -200.0, -89.0, -88.0, -50.0, -0.0, 0.0, 50.0, 1e30, math.inf])
    want = gate.double() * torch.sigmoid(gate.double())

    got = decoder_ops.silu_mul(torch.cat([gate, torch.ones(11)])[None], isa=isa)[0]

    assert got[0].isnan()  # -inf * 0, as torch's own silu
    assert got[-1] == math.inf
    torch.testing.assert_close(got[1:-1].double(), want[1:-1], rtol=1e-6, atol=1e-36)


@isas
@dtypes
def test_nan_passes_through(isa: str, dtype: torch.dtype) -> None:
    row = torch.ones(1, 34, dtype=dtype)
    row[0, 3] = math.nan

    silu = decoder_ops.silu_mul(row, isa=isa)
    norm = decoder_ops.rms_norm(row, torch.ones(34, dtype=dtype), 1e-5, isa=isa)

    assert silu.isnan().nonzero().tolist() == [[0, 3]]
    assert norm.isnan().all()


@pytest.mark.skipif(kernels_ext.cpu_isa() == "generic", reason="there is no other conversion to compare with")
def test_generic_float16_conversion_is_exact(rng: torch.Generator) -> None:
    """The baseline converts float16 by integer arithmetic, the others by an instruction: all must agree.

    With a gate of 100, silu rounds to 100 exactly, so the op is a conversion to float32, a product and a
    conversion back.
    """
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for gate in (100.0, 25.0):
        gate_up = torch.cat([torch.full_like(every, gate), every])[None]
        want = (every.float() * gate).to(torch.float16)

        got = decoder_ops.silu_mul(gate_up, isa="generic")[0]

        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    # Products that are subnormal, and ties between two neighbours.
    small = torch.cat([torch.full_like(every, 25.0), (every.float() * 2**-12).to(torch.float16)])[None]
    best = decoder_ops.silu_mul(small)
    torch.testing.assert_close(
        decoder_ops.silu_mul(small, isa="generic"), best, rtol=0, atol=0, equal_nan=True
    )


# --- rope_kv_write ------------------------------------------------------------------------------------------


@isas
@dtypes
@pytest.mark.parametrize(
    ("D", "R"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (80, 32), (10, 6), (2, 2), (64, 0)]
)
@pytest.mark.parametrize("norms", [False, True])
def test_rope_kv_write_matches_float64(
    isa: str, dtype: torch.dtype, D: int, R: int, norms: bool, rng: torch.Generator
) -> None:
    T, Hq, Hkv, blocks, block_size, P = 7, 6, 2, 5, 4, 50
    qkv = normal(rng, T, (Hq + 2 * Hkv) * D, dtype=dtype)
    cos, sin = angles(P, R)
    positions = torch.randint(0, P, (T,), generator=rng)
    positions[0], positions[1] = 0, P - 1
    slots = torch.randperm(blocks * block_size, generator=rng)[:T]
    k_cache = normal(rng, blocks, block_size, Hkv, D, dtype=dtype)
    v_cache = normal(rng, blocks, block_size, Hkv, D, dtype=dtype)
    q_weight = normal(rng, D, dtype=dtype) if norms else None
    k_weight = normal(rng, D, dtype=dtype) if norms else None

    heads = qkv.view(T, Hq + 2 * Hkv, D)
    q, k, v = heads.split([Hq, Hkv, Hkv], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = llama_rms_norm(q, q_weight, 1e-6), llama_rms_norm(k, k_weight, 1e-6)
    want_q = rotate(q, cos[positions], sin[positions])
    want_k = k_cache.double().view(-1, Hkv, D)
    want_k[slots] = rotate(k, cos[positions], sin[positions])
    want_v = v_cache.clone().view(-1, Hkv, D)
    want_v[slots] = v
    others = torch.ones(blocks * block_size, dtype=torch.bool)
    others[slots] = False
    k_before = k_cache.view(-1, Hkv, D)[others].clone()

    got = decoder_ops.rope_kv_write(
        qkv, cos, sin, positions, slots, k_cache, v_cache, Hq, q_weight, k_weight, 1e-6, isa=isa
    )

    # A norm adds two roundings, which the rotation adds up.
    factor = 4 if norms else 1
    assert got.shape == (T, Hq, D)
    assert_close(got, want_q, factor)
    assert_close(k_cache.view(-1, Hkv, D), want_k, factor)
    assert torch.equal(v_cache.view(-1, Hkv, D), want_v)
    assert torch.equal(k_cache.view(-1, Hkv, D)[others], k_before)


def test_rope_kv_write_of_no_tokens_writes_nothing() -> None:
    caches = torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8)
    empty = torch.empty(0, dtype=torch.int64)

    q = decoder_ops.rope_kv_write(torch.empty(0, 40), *angles(4, 8), empty, empty, *caches, 3)

    assert q.shape == (0, 3, 8)
    assert all(torch.equal(c, torch.ones(2, 4, 1, 8)) for c in caches)


@isas
@dtypes
def test_rope_kv_write_of_many_tokens_is_that_of_each(
    isa: str, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Enough tokens for several threads."""
    T, Hq, Hkv, D = 100, 9, 3, 64
    qkv = normal(rng, T, (Hq + 2 * Hkv) * D, dtype=dtype)
    cos, sin = angles(200, D)
    positions = torch.randint(0, 200, (T,), generator=rng)
    slots = torch.randperm(8 * 16, generator=rng)[:T]
    together = torch.zeros(8, 16, Hkv, D, dtype=dtype), torch.zeros(8, 16, Hkv, D, dtype=dtype)
    alone = torch.zeros_like(together[0]), torch.zeros_like(together[1])

    q = decoder_ops.rope_kv_write(qkv, cos, sin, positions, slots, *together, Hq, isa=isa)
    each = [
        decoder_ops.rope_kv_write(
            qkv[t : t + 1], cos, sin, positions[t : t + 1], slots[t : t + 1], *alone, Hq, isa=isa
        )
        for t in range(T)
    ]

    assert torch.equal(q, torch.cat(each))
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])


# --- paged_attention ----------------------------------------------------------------------------------------


@isas
@dtypes
@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 600])
def test_decode_matches_float64(isa: str, dtype: torch.dtype, context: int, rng: torch.Generator) -> None:
    """Contexts on and beside the edges of blocks (16), chunks (64) and partitions (256)."""
    batch = Batch.make(rng, [1], [context], dtype=dtype)

    assert_close(batch.run(isa), batch.reference(), factor=2)


@isas
@dtypes
@pytest.mark.parametrize("D", [1, 8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (4, 4), (9, 3), (8, 1), (7, 1), (14, 2)])
def test_any_head_size_and_group(
    isa: str, dtype: torch.dtype, D: int, Hq: int, Hkv: int, rng: torch.Generator
) -> None:
    batch = Batch.make(rng, [1, 5], [70, 9], Hq=Hq, Hkv=Hkv, D=D, dtype=dtype)

    assert_close(batch.run(isa), batch.reference(), factor=2)


@isas
@dtypes
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
def test_mixed_batch_matches_float64(
    isa: str, dtype: torch.dtype, block_size: int, rng: torch.Generator
) -> None:
    """Decoding sequences, a whole prompt, a chunk of a longer one, and a sequence without queries."""
    batch = Batch.make(rng, [1, 40, 0, 20, 1], [300, 40, 7, 290, 1], dtype=dtype, block_size=block_size)

    assert_close(batch.run(isa), batch.reference(), factor=2)


@isas
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 300, 10_000, 2**62])
def test_window_matches_float64(isa: str, window: int, rng: torch.Generator) -> None:
    """Blocks wholly before every window may have been freed: their entries are impossible here."""
    batch = Batch.make(rng, [1, 30, 9], [300, 30, 270], window=window)

    assert_close(batch.run(isa), batch.reference(), factor=2)


@isas
@dtypes
@pytest.mark.parametrize("window", [None, 100])
def test_result_is_independent_of_the_batch(
    isa: str, dtype: torch.dtype, window: int | None, rng: torch.Generator
) -> None:
    """The same bits: greedy text must not change with what else is running."""
    batch = Batch.make(rng, [1, 33, 1, 7], [530, 33, 65, 300], dtype=dtype, window=window)
    alone = [batch.only(s).run(isa) for s in range(4)]

    together = batch.run(isa)

    assert torch.equal(together, torch.cat(alone))


@isas
@dtypes
@pytest.mark.parametrize("window", [None, 100])
def test_chunked_prefill_equals_whole_prefill(
    isa: str, dtype: torch.dtype, window: int | None, rng: torch.Generator
) -> None:
    whole = Batch.make(rng, [150], [420], dtype=dtype, window=window)
    edges = [0, 1, 2, 17, 64, 66, 130, 149, 150]
    chunks = [whole.only(0, a, b).run(isa) for a, b in itertools.pairwise(edges)]

    assert torch.equal(torch.cat(chunks), whole.run(isa))


@isas
@pytest.mark.parametrize(("queries", "context"), [(1, 3000), (3, 2000), (400, 700)])
def test_result_is_independent_of_the_thread_count(
    isa: str, queries: int, context: int, rng: torch.Generator
) -> None:
    """One thread takes whole tiles; several share a long context's partitions, or the tiles of a prompt."""
    batch = Batch.make(rng, [queries], [context], Hq=3, Hkv=1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(batch.run(isa))
    finally:
        torch.set_num_threads(before)

    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_close(results[0], batch.reference(), factor=2)


@isas
def test_infinite_value_reaches_only_tokens_that_see_it(isa: str, rng: torch.Generator) -> None:
    """A weight of zero times infinity would be NaN."""
    batch = Batch.make(rng, [20], [100], Hq=2, Hkv=1)
    row = batch.block_tables[0, 90 // 16], 90 % 16
    batch.v_cache[row] = math.inf

    got = batch.run(isa)

    finite = got.isfinite().all(dim=1)
    assert finite.tolist() == [position < 90 for position in range(80, 100)]
    assert (got[10:] == math.inf).all()


@isas
def test_large_scores_do_not_overflow(isa: str, rng: torch.Generator) -> None:
    batch = Batch.make(rng, [2], [300])
    batch.q *= 300

    assert_close(batch.run(isa), batch.reference(), factor=20)


@isas
def test_nan_query_gives_nan_for_that_token_only(isa: str, rng: torch.Generator) -> None:
    batch = Batch.make(rng, [4], [40])
    batch.q[2] = math.nan

    got = batch.run(isa)

    assert got.isnan().all(dim=1).tolist() == [False, False, True, False]
    assert not got[[0, 1, 3]].isnan().any()


def test_no_tokens_and_no_sequences(rng: torch.Generator) -> None:
    assert Batch.make(rng, [], []).run().shape == (0, 6 * 64)
    assert Batch.make(rng, [0, 0], [5, 0]).run().shape == (0, 6 * 64)


# --- bad arguments ------------------------------------------------------------------------------------------


def rope_arguments() -> dict[str, object]:
    return {
        "qkv": torch.zeros(3, 40),
        "cos": torch.zeros(10, 8),
        "sin": torch.zeros(10, 8),
        "positions": torch.tensor([0, 1, 2]),
        "slot_mapping": torch.tensor([0, 1, 2]),
        "k_cache": torch.zeros(2, 4, 1, 8),
        "v_cache": torch.zeros(2, 4, 1, 8),
        "num_heads": 3,
    }


def attention_arguments() -> dict[str, object]:
    return {
        "q": torch.zeros(3, 2, 8),
        "k_cache": torch.zeros(5, 4, 1, 8),
        "v_cache": torch.zeros(5, 4, 1, 8),
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "query_start": torch.tensor([0, 1, 3], dtype=torch.int32),
        "context_lens": torch.tensor([5, 8], dtype=torch.int32),
        "scale": 1.0,
    }


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 8).t()}, "x must be contiguous"),
        ({"x": torch.zeros(8)}, "x must have 2 dimensions, got shape [8]"),
        ({"x": torch.zeros(2, 8, dtype=torch.float64)}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.zeros(2, 0), "weight": torch.zeros(0)}, "x must have at least one column"),
        ({"weight": torch.zeros(7)}, "weight has shape [7], but dimension 0 must be 8"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, "weight must be Float, got BFloat16"),
        ({"weight": torch.zeros(16)[::2]}, "weight must be contiguous"),
        ({"residual": torch.zeros(3, 8)}, "residual has shape [3, 8], but dimension 0 must be 2"),
        ({"residual": torch.zeros(2, 16)[:, ::2]}, "residual must be contiguous"),
        ({"residual": torch.zeros(2, 8, dtype=torch.float16)}, "residual must be Float, got Half"),
    ],
)
def test_norms_reject(changes: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "residual": torch.zeros(2, 8)} | changes

    with pytest.raises(ValueError, match=r"^add_rms_norm: ") as error:
        decoder_ops.add_rms_norm(arguments["x"], arguments["residual"], arguments["weight"], 1e-5)

    assert message in str(error.value)
    if "residual" not in changes:
        with pytest.raises(ValueError, match=r"^rms_norm: "):
            decoder_ops.rms_norm(arguments["x"], arguments["weight"], 1e-5)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), "an even number of columns, got shape [2, 7]"),
        (torch.zeros(2, 16)[:, ::2], "gate_up must be contiguous"),
        (torch.zeros(8), "gate_up must have 2 dimensions"),
        (torch.zeros(2, 8, dtype=torch.int32), "gate_up must be float32, bfloat16 or float16, got Int"),
    ],
)
def test_silu_mul_rejects(gate_up: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=r"^silu_mul: ") as error:
        decoder_ops.silu_mul(gate_up)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.tensor([0, 10, 2])}, "positions[1] is 10, outside 0 to 9"),
        ({"positions": torch.tensor([0, 1, -1])}, "positions[2] is -1, outside 0 to 9"),
        ({"slot_mapping": torch.tensor([8, 1, 2])}, "slot_mapping[0] is 8, outside 0 to 7"),
        ({"slot_mapping": torch.tensor([0, 1, -1])}, "slot_mapping[2] is -1, outside 0 to 7"),
        ({"positions": int32(0, 1, 2)}, "positions must be Long, got Int"),
        ({"positions": torch.tensor([0, 1])}, "positions has shape [2], but dimension 0 must be 3"),
        ({"slot_mapping": torch.tensor([0, 1])}, "slot_mapping has shape [2]"),
        ({"qkv": torch.zeros(3, 41)}, "qkv has shape [3, 41], but dimension 1 must be 40"),
        ({"qkv": torch.zeros(40, 3).t()}, "qkv must be contiguous"),
        ({"num_heads": 0}, "num_heads must be positive, got 0"),
        ({"cos": torch.zeros(10, 10)}, "cos must have an even number of columns, at most the head size 8"),
        ({"cos": torch.zeros(10, 7)}, "cos must have an even number of columns"),
        ({"cos": torch.zeros(10, 8, dtype=torch.bfloat16)}, "cos must be Float, got BFloat16"),
        ({"sin": torch.zeros(9, 8)}, "sin has shape [9, 8], but dimension 0 must be 10"),
        ({"k_cache": torch.zeros(2, 4, 1, 8, dtype=torch.float16)}, "k_cache must be Float, got Half"),
        ({"k_cache": torch.zeros(2, 4, 1, 16)[..., ::2]}, "k_cache must be contiguous"),
        ({"v_cache": torch.zeros(2, 5, 1, 8)}, "v_cache has shape [2, 5, 1, 8], but dimension 1 must be 4"),
        ({"q_norm_weight": torch.zeros(7)}, "q_norm_weight has shape [7]"),
        ({"k_norm_weight": torch.zeros(8, dtype=torch.float16)}, "k_norm_weight must be Float, got Half"),
    ],
)
def test_rope_kv_write_rejects_and_writes_nothing(changes: dict[str, object], message: str) -> None:
    arguments = rope_arguments() | changes
    arguments["qkv"].fill_(1.0)  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match=r"^rope_kv_write: ") as error:
        decoder_ops.rope_kv_write(**arguments)  # type: ignore[arg-type]

    assert message in str(error.value)
    assert not arguments["k_cache"].any()  # type: ignore[attr-defined]
    assert not arguments["v_cache"].any()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_tables": torch.stack([int32(0, 5), int32(2, 3)])},
            "block_tables[0, 1] is 5, outside 0 to 4",
        ),
        (
            {"block_tables": torch.stack([int32(0, 1), int32(-1, 3)])},
            "block_tables[1, 0] is -1, outside 0 to 4",
        ),
        ({"block_tables": torch.stack([int32(0, 1)])}, "block_tables has shape [1, 2]"),
        ({"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, "block_tables must be Int, got Long"),
        ({"block_tables": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "block_tables must be contiguous"),
        (
            {"context_lens": int32(9, 8)},
            "context_lens[0] is 9, but a row of block_tables holds 2 blocks of 4",
        ),
        ({"context_lens": int32(5, 1)}, "context_lens[1] is 1, but sequence 1 has 2 query tokens"),
        ({"context_lens": int32(0, 8)}, "context_lens[0] is 0"),
        ({"query_start": int32(1, 1, 3)}, "query_start[0] must be 0, got 1"),
        ({"query_start": int32(0, 1, 2)}, "query_start ends with 2, but q has 3 rows"),
        ({"query_start": int32(0, 4, 3)}, "query_start must not fall, got 4 then 3 at sequence 1"),
        ({"query_start": int32(0, 3)}, "query_start has shape [2]"),
        ({"q": torch.zeros(3, 2, 9)}, "q has shape [3, 2, 9], but dimension 2 must be 8"),
        ({"q": torch.zeros(2, 3, 8).transpose(0, 1)}, "q must be contiguous"),
        ({"q": torch.zeros(3, 0, 8)}, "q has 0 heads"),
        (
            {"k_cache": torch.zeros(5, 4, 3, 8), "v_cache": torch.zeros(5, 4, 3, 8)},
            "expected a multiple of the 3",
        ),
        ({"v_cache": torch.zeros(5, 4, 1, 7)}, "v_cache has shape [5, 4, 1, 7]"),
        ({"v_cache": torch.zeros(5, 4, 1, 8, dtype=torch.float16)}, "v_cache must be Float, got Half"),
        ({"window": 0}, "window must be positive, got 0"),
    ],
)
def test_paged_attention_rejects(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r"^paged_attention: ") as error:
        decoder_ops.paged_attention(**(attention_arguments() | changes))  # type: ignore[arg-type]

    assert message in str(error.value)


def test_unknown_isa_is_rejected() -> None:
    with pytest.raises(ValueError, match="isa must be one of generic, avx2, avx512, got 'sse'"):
        decoder_ops.silu_mul(torch.zeros(1, 2), isa="sse")


# --- torch.library ------------------------------------------------------------------------------------------


@dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    """Schemas, mutation annotations and fake kernels agree with what the ops do."""
    ops = torch.ops.kernels_ext
    x, weight = torch.randn(3, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    rope = [a.to(dtype) if n in {"qkv", "k_cache", "v_cache"} else a for n, a in rope_arguments().items()]  # type: ignore[attr-defined]
    attention = [
        a.to(dtype) if n in {"q", "k_cache", "v_cache"} else a
        for n, a in attention_arguments().items()  # type: ignore[attr-defined]
    ]

    opcheck(ops.rms_norm.default, (x, weight, 1e-5))
    opcheck(ops.add_rms_norm.default, (x, torch.randn(3, 8, dtype=dtype), weight, 1e-5))
    opcheck(ops.rope_kv_write.default, tuple(rope))
    opcheck(ops.rope_kv_write.default, (*rope, weight, weight, 1e-5))
    opcheck(ops.paged_attention.default, tuple(attention))
    opcheck(ops.paged_attention.default, (*attention, 3))
    opcheck(ops.silu_mul.default, (x,))


def decoder_layer(x: Tensor, residual: Tensor, weight: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
    """All ops in the order of a decoder layer, with plain slices in place of its linears."""
    T = x.shape[0]
    x = decoder_ops.add_rms_norm(x, residual, weight, 1e-5)
    cos, sin = angles(8, 8)
    positions = torch.arange(T)
    q = decoder_ops.rope_kv_write(x, cos, sin, positions, positions, *caches, 3)
    tables = torch.tensor([[0, 1]], dtype=torch.int32)
    starts, lens = torch.tensor([0, T], dtype=torch.int32), torch.tensor([T], dtype=torch.int32)
    attended = decoder_ops.paged_attention(q, *caches, tables, starts, lens, 8**-0.5)
    residual[:, :24] += attended
    return decoder_ops.silu_mul(decoder_ops.rms_norm(residual, weight, 1e-5))


def test_torch_compile_gives_the_same(rng: torch.Generator) -> None:
    x, residual, weight = normal(rng, 5, 40), normal(rng, 5, 40), normal(rng, 40)
    eager_residual, compiled_residual = residual.clone(), residual.clone()
    eager_caches = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    compiled_caches = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    eager = decoder_layer(x, eager_residual, weight, eager_caches)

    compiled = torch.compile(decoder_layer, fullgraph=True, backend="aot_eager")(
        x, compiled_residual, weight, compiled_caches
    )

    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(compiled_residual, eager_residual)
    torch.testing.assert_close(compiled_caches[0], eager_caches[0])
    torch.testing.assert_close(compiled_caches[1], eager_caches[1])
