"""The lane-stream format without a GPU: the reference round-trips, the validator finds what is wrong."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ext import lane_stream
from kernels_ext.formats import lane_stream as reference
from kernels_ext.formats.lane_stream import LaneStreamPlan, PackedLaneStreams

H200 = lane_stream.DeviceShape(
    multiprocessors=132, shared_bytes_per_block=232448, shared_bytes_per_multiprocessor=233472
)


def make_plan(N: int, K: int, **numbers: int) -> LaneStreamPlan:
    defaults = {"group_tiles": 2, "k_slices": 1, "blocks_per_slice": 1, "warps_per_block": 1, "lookahead": 1}
    return LaneStreamPlan(N=N, K=K, **{**defaults, **numbers})


def random_bits(N: int, K: int, sparsity: float, seed: int = 0) -> npt.NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    bits = rng.integers(1, 65536, (N, K)).astype(np.uint16)
    bits[rng.random((N, K)) < sparsity] = 0
    return bits


@st.composite
def plans(draw: st.DrawFn) -> LaneStreamPlan:
    N, K = draw(st.integers(1, 100)), draw(st.integers(1, 600))
    group_tiles = draw(st.sampled_from([2, 4]))
    k_slices = draw(st.integers(1, 3))
    warps = draw(st.integers(1, 4))
    groups = -(-N // (32 * warps)) * -(-K // (64 * group_tiles * k_slices))
    blocks = draw(st.integers(1, groups))
    lookahead = draw(st.integers(1, 4))
    return LaneStreamPlan(
        N=N,
        K=K,
        group_tiles=group_tiles,
        k_slices=k_slices,
        blocks_per_slice=blocks,
        warps_per_block=warps,
        lookahead=lookahead,
    )


@settings(max_examples=25, deadline=None)
@given(plan=plans(), sparsity=st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), seed=st.integers(0, 2**16))
def test_round_trip_is_exact_and_valid(plan: LaneStreamPlan, sparsity: float, seed: int) -> None:
    bits = random_bits(plan.N, plan.K, sparsity, seed)
    packed = reference.pack(bits, plan)
    reference.validate(packed)
    np.testing.assert_array_equal(reference.unpack(packed), bits)


def test_every_stream_has_its_share() -> None:
    """Streams are equally long to within one group, and no more blocks than expected share a band."""
    plan = make_plan(96, 1000, k_slices=2, blocks_per_slice=2, warps_per_block=2)
    lengths = [plan.first_group(i + 1) - plan.first_group(i) for i in range(plan.blocks_per_slice)]
    assert sum(lengths) == plan.slice_groups
    assert max(lengths) - min(lengths) <= 1
    for group in range(plan.slice_groups):
        owner = plan.owner(group)
        assert plan.first_group(owner) <= group < plan.first_group(owner + 1)
    assert max(plan.band_parts(b)[1] for b in range(plan.bands)) <= plan.max_parts_per_slice


def test_golden_bytes() -> None:
    """The format may not change unnoticed: packed weights may be cached beside a checkpoint."""
    rows, columns = np.meshgrid(np.arange(70), np.arange(300), indexing="ij")
    bits = ((rows * 977 + columns * 131) % 65521).astype(np.uint16)
    bits[(rows * 7 + columns * 13) % 5 < 2] = 0
    plan = make_plan(70, 300, k_slices=2, blocks_per_slice=2, warps_per_block=1, lookahead=2)
    packed = reference.pack(bits, plan)
    assert packed.plan.numbers == GOLDEN_PLAN
    assert hashlib.sha256(packed.data.tobytes()).hexdigest() == GOLDEN_DATA
    assert hashlib.sha256(packed.descriptors.tobytes()).hexdigest() == GOLDEN_DESCRIPTORS


GOLDEN_PLAN = [70, 300, 2, 2, 2, 1, 2, 116]
GOLDEN_DATA = "10b80a81ba3fdbc353871e3c47143ccc90b6e3667f15cbf750a04933f83f7f2c"
GOLDEN_DESCRIPTORS = "6813b45cb40a93524e90fef4665df1d292c2ccd457d5c4d9a777f9e1908c4ac2"


def corrupt_sources(packed: PackedLaneStreams) -> None:
    packed.data[0:2] = packed.data[2:4]


def corrupt_mask(packed: PackedLaneStreams) -> None:
    """Claim elements whose values never arrive."""
    head = packed.plan.head_bytes
    packed.data[reference.HEADER_BYTES : head] = 0xFF


def corrupt_refill(packed: PackedLaneStreams) -> None:
    packed.data[reference.REFILL_OFFSET + 8] ^= 0x80


def corrupt_reserved(packed: PackedLaneStreams) -> None:
    packed.data[reference.HEADER_BYTES - 1] = 1


def corrupt_group_count(packed: PackedLaneStreams) -> None:
    packed.descriptors[0, 1] += 1


def corrupt_first_line(packed: PackedLaneStreams) -> None:
    packed.descriptors[0, 6] += 1


def corrupt_line_past_the_end(packed: PackedLaneStreams) -> None:
    packed.descriptors[0, 6] = packed.data.size // reference.ROW_BYTES


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_sources, "no permutation"),
        (corrupt_mask, r"have arrived|past N"),
        (corrupt_refill, "refill record"),
        (corrupt_reserved, "reserved bytes"),
        (corrupt_group_count, "disagrees with the plan"),
        (corrupt_first_line, "stream 0"),
        (corrupt_line_past_the_end, "ends at byte"),
    ],
)
def test_validator_names_the_fault(corrupt, message: str) -> None:
    packed = reference.pack(random_bits(64, 512, 0.5), make_plan(64, 512, blocks_per_slice=2))
    corrupt(packed)
    with pytest.raises(ValueError, match=message):
        reference.validate(packed)


def test_validator_refuses_trailing_and_missing_bytes() -> None:
    packed = reference.pack(random_bits(64, 512, 0.5), make_plan(64, 512))
    longer = np.concatenate([packed.data, np.zeros(128, np.uint8)])
    with pytest.raises(ValueError, match="the transfers end at byte"):
        reference.validate(replace(packed, data=longer))
    with pytest.raises(ValueError, match="ends at byte"):
        reference.validate(replace(packed, data=packed.data[:-128]))


def test_validator_refuses_a_ring_that_is_too_small() -> None:
    """A refill would overwrite values that a lane still needs."""
    packed = reference.pack(random_bits(64, 1024, 0.5), make_plan(64, 1024))
    smaller = replace(packed, plan=replace(packed.plan, ring_rows=packed.plan.ring_rows - 1))
    with pytest.raises(ValueError, match=r"rows are needed at once|refill record"):
        reference.validate(smaller)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"group_tiles": 3}, "2 or 4"),
        ({"lookahead": 0}, "lookahead must be 1 to 4"),
        ({"lookahead": 5}, "lookahead must be 1 to 4"),
        ({"warps_per_block": 17}, "warps_per_block"),
        ({"blocks_per_slice": 9}, "9 blocks, but only 8 groups"),
        ({"ring_rows": 15}, "ring_rows"),
    ],
)
def test_a_bad_plan_is_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(64, 512, **numbers)


@pytest.mark.parametrize(
    ("N", "K"),
    [
        (1, 1),
        (100, 77),
        (4096, 4096),
        (6144, 4096),
        (28672, 4096),
        (8192, 28672),
        (128256, 4096),
        (49152, 576),
    ],
)
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_ranked_plans_fit_the_device(N: int, K: int, sparsity: float) -> None:
    """Every plan fits shared memory with 16 tokens, all its blocks at once."""
    for plan in lane_stream.ranked_plans(N, K, sparsity, H200)[:20]:
        assert plan.shared_bytes(16) <= H200.shared_limit(plan)
        assert plan.k_slices * plan.blocks_per_slice <= 2 * H200.multiprocessors


@pytest.mark.parametrize("multiprocessors", [1, 20, 114, 148])
def test_plans_exist_for_any_number_of_multiprocessors(multiprocessors: int) -> None:
    """No literal 132: smaller and larger chips, with the 99 KiB of shared memory that some have."""
    for shared in (101376, 232448):
        device = lane_stream.DeviceShape(
            multiprocessors=multiprocessors,
            shared_bytes_per_block=shared,
            shared_bytes_per_multiprocessor=shared + 1024,
        )
        assert lane_stream.ranked_plans(4096, 4096, 0.5, device)


def test_too_little_shared_memory_is_an_error() -> None:
    device = replace(H200, shared_bytes_per_block=4096)
    with pytest.raises(ValueError, match="no plan for N=4096"):
        lane_stream.ranked_plans(4096, 4096, 0.5, device)


def test_without_cuda_kernels_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a silent fallback."""
    info = replace(lane_stream.build_info(), cuda_loaded=False, cuda_reason="KERNELS_CUDA=OFF at build")
    monkeypatch.setattr(lane_stream, "build_info", lambda: info)
    with pytest.raises(lane_stream.LaneStreamUnavailable, match="KERNELS_CUDA=OFF at build"):
        lane_stream.lane_stream_pack(torch.ones(4, 4, dtype=torch.float16))


def test_ops_have_fake_kernels() -> None:
    """torch.compile sees shapes without a GPU."""
    plan = make_plan(70, 300, k_slices=2)
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, 300, dtype=torch.bfloat16)
        data, workspace = torch.empty(1024, dtype=torch.uint8), torch.empty(1024, dtype=torch.uint8)
        descriptors = torch.empty(plan.streams, reference.DESCRIPTOR_WORDS, dtype=torch.int32)
        y = torch.ops.kernels_ext.lane_stream_linear(x, data, descriptors, None, workspace, plan.numbers)
        assert (y.shape, y.dtype) == ((3, 70), torch.bfloat16)
        dense = torch.empty(70, 300, dtype=torch.int16)
        group_rows, least_rows = torch.ops.kernels_ext.lane_stream_measure(dense, plan.numbers)
        assert group_rows.shape == least_rows.shape == (plan.streams, plan.max_groups_per_stream)
