"""The 2:4 form against its page, and the choice of a plan; no GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels_ext import semi_structured
from kernels_ext.formats import semi_structured as reference
from kernels_ext.lane_stream import DeviceShape
from kernels_ext.semi_structured import SemiStructuredPlan

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "semi_structured.safetensors"

H200 = DeviceShape(multiprocessors=132, shared_bytes_per_block=232448, shared_bytes_per_multiprocessor=233472)


def two_of_four(N: int, K: int, seed: int = 0, share: float = 0.3) -> np.ndarray:
    """Random bits at two places of every quad, a share of them zero."""
    rng = np.random.default_rng(seed)
    quads = rng.integers(1, 1 << 15, (N, -(-K // 4), 4), dtype=np.uint16)
    place = rng.random(quads.shape).argsort(-1).argsort(-1)
    quads[(place >= 2) | (rng.random(quads.shape) < share)] = 0
    return quads.reshape(N, -1)[:, :K].copy()


def indices(data: np.ndarray) -> np.ndarray:
    """Every pair of indices, as (lower, upper)."""
    words = np.ascontiguousarray(data.reshape(-1, 4608)[:, 4096:]).view(np.uint32)
    nibbles = np.stack([words >> np.uint32(s) & 15 for s in range(0, 32, 4)])
    return np.stack([nibbles & 3, nibbles >> 2])


@pytest.mark.parametrize(("N", "K"), [(1, 1), (31, 127), (32, 128), (33, 129), (64, 260)])
def test_reference_round_trips(N: int, K: int) -> None:
    dense = two_of_four(N, K)
    data = reference.pack(dense)
    reference.validate(data, N, K)
    np.testing.assert_array_equal(reference.unpack(data, N, K), dense)


@pytest.mark.parametrize("name", ["tile", "ragged"])
def test_packer_gives_the_golden_bytes(name: str) -> None:
    """A change of the layout must show, even one that packer and unpacker share."""
    golden = load_file(GOLDEN)
    dense = golden[f"{name}.dense"].numpy().view(np.uint16)
    np.testing.assert_array_equal(reference.pack(dense), golden[f"{name}.data"].numpy())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_index_pairs_always_ascend(share: float) -> None:
    """Where a quad has fewer than two non-zeros the hardware still needs two different indices."""
    low, high = indices(reference.pack(two_of_four(32, 256, share=share)))
    assert (low < high).all()


def test_an_element_lies_where_the_page_says() -> None:
    """Row 9 + 16, columns 32 + 4 * 5 and two on: tile 1, step 1, quad 5, so lane 5, register 3."""
    dense = np.zeros((32, 128), np.uint16)
    dense[25, 52], dense[25, 54] = 0x3C00, 0x4000
    data = reference.pack(dense)
    values = data[:4096].view(np.uint16).reshape(4, 2, 32, 4, 2)
    assert values[1, 1, 5, 3].tolist() == [0x3C00, 0x4000]
    assert np.count_nonzero(values) == 2
    words = data[4096:].view(np.uint32).reshape(32, 4)
    # Rows 1 and 9 are lanes 4 to 7; an odd step's upper quads are the last of them.
    assert words[7, 1] >> (16 + 4) & 15 == 0 | 2 << 2


def test_minus_zero_is_a_zero() -> None:
    """Pruning by a mask leaves -0.0."""
    dense = np.array([[0x8000, 0x3C00, 0x3C01, 0x8000]], np.uint16)
    unpacked = reference.unpack(reference.pack(dense), 1, 4)
    assert unpacked.tolist() == [[0, 0x3C00, 0x3C01, 0]]


def test_three_of_four_are_refused() -> None:
    dense = np.zeros((2, 8), np.uint16)
    dense[1, 5:8] = 1
    with pytest.raises(ValueError, match="row 1, columns 4 to 7: 3 of 4"):
        reference.pack(dense)


def test_validator_finds_equal_indices() -> None:
    data = reference.pack(two_of_four(32, 128))
    data[4096] = 0
    with pytest.raises(ValueError, match="do not ascend"):
        reference.validate(data, 32, 128)


def test_validator_finds_values_in_the_padding() -> None:
    data = reference.pack(two_of_four(33, 128))
    data[4608 + 4095] = 1
    with pytest.raises(ValueError, match="outside"):
        reference.validate(data, 33, 128)


@pytest.mark.parametrize("K", [4, 5, 8])
def test_detection(K: int) -> None:
    weight = torch.zeros(3, K)
    weight[1, :2] = 1
    assert semi_structured.is_semi_structured(weight)
    weight[1, 3] = 1
    assert not semi_structured.is_semi_structured(weight)


@pytest.mark.parametrize("M", [8, 16, 32, 64])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (100, 200), (4096, 4096), (28672, 4096), (8192, 28672)])
def test_a_plan_covers_the_matrix_once_and_fits(N: int, K: int, M: int) -> None:
    plan = semi_structured.best_plan(N, K, M, H200)
    assert plan.shared_bytes(M) <= H200.shared_bytes_per_block
    assert plan.warps % plan.k_warps == 0
    assert plan.parts * plan.part_groups * 128 >= K
    taken = [
        strip
        for block in range(plan.blocks // plan.k_slices)
        for strip in range(
            block * plan.strips_per_block, min((block + 1) * plan.strips_per_block, plan.strips)
        )
    ]
    assert taken == list(range(plan.strips))


def test_plans_of_large_layers_leave_no_multiprocessor_twice_as_busy() -> None:
    """A launch takes as long as its busiest multiprocessor."""
    for N, K in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (8192, 28672)):
        plan = semi_structured.best_plan(N, K, 8, H200)
        groups = plan.warps * plan.part_groups * plan.rounds * -(-plan.blocks // H200.multiprocessors)
        even = plan.strips * -(-K // 128) / H200.multiprocessors
        assert groups <= 1.25 * even, plan


def test_plan_is_eight_numbers_in_the_order_of_the_op() -> None:
    plan = SemiStructuredPlan(
        N=1, K=2, k_slices=3, strips_per_block=4, warps=6, k_warps=2, x_groups=7, ring_slots=8
    )
    assert plan.numbers == [1, 2, 3, 4, 6, 2, 7, 8]
