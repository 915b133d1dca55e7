"""TCA-BME against its page: the worked example, golden files, round trips, and damage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from kernels_ext.formats import tca_bme
from kernels_ext.formats.tca_bme import TcaBme

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "tca_bme.safetensors"
ARRAYS = ("bitmaps", "values", "group_offsets", "strip_offsets")
DTYPES = [torch.float16, torch.bfloat16]


def golden_names() -> list[str]:
    with safe_open(GOLDEN, framework="pt") as file:
        return [key.removesuffix(".dense") for key in file.keys() if key.endswith(".dense")]  # noqa: SIM118


def golden(name: str) -> tuple[Tensor, TcaBme]:
    with safe_open(GOLDEN, framework="pt") as file:
        dense = file.get_tensor(f"{name}.dense")
        arrays = {array: file.get_tensor(f"{name}.{array}") for array in ARRAYS}
        largest = int(file.get_tensor(f"{name}.max_group_values"))
    return dense, TcaBme(*dense.shape, **arrays, max_group_values=largest)


def bits(tensor: Tensor) -> Tensor:
    """NaN payloads and the sign of zero count."""
    return tensor.view(torch.int16) if tensor.is_floating_point() else tensor


def assert_same(got: TcaBme, want: TcaBme) -> None:
    assert (got.N, got.K, got.dtype) == (want.N, want.K, want.dtype)
    for name in ARRAYS:
        assert torch.equal(bits(getattr(got, name)), bits(getattr(want, name))), name
    assert got.max_group_values == want.max_group_values


def pruned(N: int, K: int, sparsity: float, dtype: torch.dtype, seed: int = 7) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    dense = torch.randn(N, K, generator=rng).to(dtype)
    dense[torch.rand(N, K, generator=rng) < sparsity] = 0
    return dense


def changed(weight: TcaBme, **changes: Any) -> TcaBme:
    return dataclasses.replace(weight, **changes)


def with_element(tensor: Tensor, index: tuple[int, ...], value: int) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


# --- the page -----------------------------------------------------------------------------------------------

EXAMPLE = torch.zeros(3, 70, dtype=torch.float16)
EXAMPLE[0, 0], EXAMPLE[1, 9], EXAMPLE[2, 7], EXAMPLE[0, 69] = 1.0, 3.0, 2.0, -0.0


@pytest.mark.parametrize("pack", [tca_bme.pack, tca_bme.pack_reference])
def test_packers_give_the_example_of_the_page(pack: Any) -> None:
    weight = pack(EXAMPLE)

    bitmaps = torch.zeros(2, 64, dtype=torch.int64)
    bitmaps[0, 0], bitmaps[0, 2], bitmaps[1, 0] = 0x800001, 0x200, 0x20
    values = [0x3C00, 0x4000, 0x4200, *[0] * 5, -0x8000, *[0] * 7]
    assert torch.equal(weight.bitmaps, bitmaps)
    assert bits(weight.values).tolist() == values
    assert weight.group_offsets.tolist() == [0, 8, 16]
    assert weight.strip_offsets.tolist() == [[0, 3, 3, 3], [0, 1, 1, 1]]
    assert weight.max_group_values == 8
    assert weight.nnz == 4
    assert weight.stored_bytes == 2 * 16 + 8 * 64 * 2 + 4 * 3 + 16 * 2
    assert weight.dense_bytes == 2 * 3 * 70


def test_a_tile_is_one_register_of_the_mma_fragment() -> None:
    """mma.m16n8k16: register r of lane l is row l // 4 + 8 * (r % 2), columns 2 * (l % 4) + 8 * (r // 2)."""
    dense = torch.arange(1, 257, dtype=torch.int16).view(16, 16).view(torch.float16)

    weight = tca_bme.pack(dense)

    values = bits(weight.values).tolist()
    for register in range(4):
        for lane in range(32):
            row, column = lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2)
            first = 64 * register + 2 * lane
            assert values[first : first + 2] == bits(dense)[row, column : column + 2].tolist()


@pytest.mark.parametrize("name", golden_names())
def test_packers_give_the_golden_files(name: str) -> None:
    dense, want = golden(name)

    assert_same(tca_bme.pack(dense), want)
    assert_same(tca_bme.pack_reference(dense), want)


@pytest.mark.parametrize("name", golden_names())
def test_golden_files_unpack_bit_for_bit(name: str) -> None:
    dense, weight = golden(name)

    assert torch.equal(bits(tca_bme.unpack(weight.validate())), bits(dense))
    assert torch.equal(bits(tca_bme.unpack_reference(weight)), bits(dense))


# --- round trips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize(
    ("N", "K"), [(1, 1), (1, 64), (64, 1), (7, 9), (8, 8), (15, 17), (63, 63), (64, 64), (65, 65), (128, 192)]
)
def test_round_trip_on_and_beside_every_tile_edge(
    N: int, K: int, sparsity: float, dtype: torch.dtype
) -> None:
    dense = pruned(N, K, sparsity, dtype)

    weight = tca_bme.pack(dense).validate()

    assert_same(weight, tca_bme.pack_reference(dense))
    assert weight.nnz == int((bits(dense) != 0).sum())
    assert torch.equal(bits(tca_bme.unpack(weight)), bits(dense))


@given(
    N=st.integers(1, 70),
    K=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    keep=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=60)
def test_any_bits_round_trip(N: int, K: int, dtype: torch.dtype, keep: float, seed: int) -> None:
    """Any 16 bits, whatever number they are: NaN payloads, infinities, subnormals, -0.0."""
    rng = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(2**15), 2**15, (N, K), generator=rng, dtype=torch.int16)
    raw[torch.rand(N, K, generator=rng) > keep] = 0
    dense = raw.view(dtype)

    weight = tca_bme.pack(dense).validate()

    assert torch.equal(bits(tca_bme.unpack(weight)), raw)
    assert torch.equal(bits(tca_bme.unpack_reference(weight)), raw)


def test_strides_do_not_matter() -> None:
    dense = pruned(80, 70, 0.5, torch.float16)

    assert_same(tca_bme.pack(dense.t().contiguous().t()), tca_bme.pack(dense))


def test_a_stored_zero_is_valid() -> None:
    """The packer never writes one, but another's mask may keep a weight that is 0."""
    weight = tca_bme.pack(pruned(10, 10, 0.5, torch.float16))
    weight = changed(weight, values=with_element(weight.values, (0,), 0)).validate()

    dense = tca_bme.unpack(weight)

    assert int((dense != 0).sum()) == weight.nnz - 1


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (torch.zeros(4, 4), "dense must be float16 or bfloat16, got torch.float32"),
        (torch.zeros(0, 4, dtype=torch.float16), r"N and K at least 1, got shape \(0, 4\)"),
        (torch.zeros(4, 0, dtype=torch.float16), r"N and K at least 1, got shape \(4, 0\)"),
        (torch.zeros(4, dtype=torch.float16), r"dense must be \[N, K\]"),
    ],
)
@pytest.mark.parametrize("pack", [tca_bme.pack, tca_bme.pack_reference])
def test_packers_reject(pack: Any, dense: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(dense)


# --- damage -------------------------------------------------------------------------------------------------


@pytest.fixture
def weight() -> TcaBme:
    """4 GroupTiles, all but the first ending inside of the padding."""
    return tca_bme.pack(pruned(100, 90, 0.5, torch.float16)).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"N": 0}, "N and K must be at least 1, got N=0"),
        (lambda w: {"N": 129}, r"bitmaps must have shape \(6, 64\), got \(4, 64\)"),
        (lambda w: {"bitmaps": w.bitmaps.int()}, "bitmaps must be torch.int64, got torch.int32"),
        (lambda w: {"bitmaps": w.bitmaps[:3]}, r"bitmaps must have shape \(4, 64\)"),
        (lambda w: {"bitmaps": w.bitmaps.t().contiguous().t()}, "bitmaps must be contiguous"),
        (lambda w: {"values": w.values.float()}, "values must be torch.float16 or torch.bfloat16"),
        (lambda w: {"values": w.values[None]}, "values must have shape"),
        (lambda w: {"values": w.values.repeat_interleave(2)[::2]}, "values must be contiguous"),
        (lambda w: {"group_offsets": w.group_offsets.long()}, "group_offsets must be torch.int32"),
        (lambda w: {"group_offsets": w.group_offsets[1:]}, r"group_offsets must have shape \(5,\)"),
        (lambda w: {"strip_offsets": w.strip_offsets[:, :3]}, r"strip_offsets must have shape \(4, 4\)"),
        (lambda w: {"strip_offsets": w.strip_offsets.to("meta")}, "strip_offsets is on meta"),
    ],
)
def test_construction_rejects(weight: TcaBme, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"TcaBme.*{message}"):
        changed(weight, **change(weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {"group_offsets": with_element(w.group_offsets, (0,), 8)},
            "group_offsets must start with 0, got 8",
        ),
        (lambda w: {"values": w.values[:-8]}, "group_offsets end with"),
        (
            lambda w: {"group_offsets": with_element(w.group_offsets, (2,), int(w.group_offsets[2]) + 8)},
            r"GroupTile 1 \(row 0, column 64\) has \d+ bits set.*2 of 4 GroupTiles are wrong",
        ),
        (
            lambda w: {"group_offsets": with_element(w.group_offsets, (1,), -(2**31))},
            r"GroupTile 0 \(row 0, column 0\)",
        ),
        (
            lambda w: {"bitmaps": with_element(w.bitmaps, (2, 0), 0)},
            r"GroupTile 2 \(row 64, column 0\) has \d+ bits set",
        ),
        (
            lambda w: {"strip_offsets": with_element(w.strip_offsets, (3, 2), 4)},
            r"GroupTile 3 .* must have strip_offsets \[0, .*\], got \[0, \d+, 4, ",
        ),
        (lambda w: {"max_group_values": w.max_group_values + 8}, "but the fullest GroupTile has"),
        (lambda w: {"N": 99}, r"GroupTile 2 .* has bits set outside of the matrix, in BitmapTile 32"),
        (lambda w: {"K": 89}, r"GroupTile 1 .* has bits set outside of the matrix, in BitmapTile"),
    ],
)
def test_validator_rejects(weight: TcaBme, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"TcaBme.*{message}"):
        changed(weight, **change(weight)).validate()


def test_validator_rejects_padding_values() -> None:
    weight = tca_bme.pack(EXAMPLE)
    for index in (3, 7, 9, 15):
        with pytest.raises(ValueError, match=r"GroupTile [01] .* has padding values that are not zero"):
            changed(weight, values=with_element(weight.values, (index,), 1)).validate()


@given(data=st.data(), N=st.integers(1, 70), K=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_flipped_bits_are_rejected_or_decode_in_bounds(
    data: st.DataObject, N: int, K: int, seed: int
) -> None:
    """Whatever the validator lets through decodes without touching anything outside of its arrays."""
    weight = tca_bme.pack(pruned(N, K, 0.5, torch.bfloat16, seed))
    arrays = {name: getattr(weight, name).clone() for name in ARRAYS}
    for _ in range(data.draw(st.integers(1, 3))):
        flat = arrays[data.draw(st.sampled_from(ARRAYS))].flatten().view(torch.uint8)
        if len(flat):
            flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    try:
        damaged = changed(weight, **arrays).validate()
    except ValueError:
        return

    dense = tca_bme.unpack_reference(damaged)
    assert torch.equal(bits(tca_bme.unpack(damaged)), bits(dense))
    assert dense.shape == (N, K)


@pytest.mark.parametrize("array", ["bitmaps", "group_offsets", "strip_offsets"])
def test_any_single_flipped_bit_of_the_structure_is_rejected(array: str) -> None:
    """One bit changes a count, and every count is there twice. One bit of each byte is tried."""
    weight = tca_bme.pack(pruned(20, 70, 0.5, torch.float16))
    original = getattr(weight, array)
    for position in range(original.numel() * original.element_size()):
        damaged = original.clone()
        damaged.flatten().view(torch.uint8)[position] ^= 1 << (position * 5 % 8)
        with pytest.raises(ValueError, match="TcaBme"):
            changed(weight, **{array: damaged}).validate()
