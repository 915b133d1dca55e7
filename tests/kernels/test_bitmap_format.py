"""The bitmap format: packing loses nothing, the reference and the kernels agree, and bad data is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.library import opcheck

import kernels_ext
from kernels_ext import BitmapWeight, bitmap_pack, bitmap_unpack
from kernels_ext.formats import bitmap as reference

DATA = Path(__file__).parents[1] / "data"
EDGES = load_file(DATA / "edge_matrices.safetensors")
GOLDEN = load_file(DATA / "golden" / "bitmap.safetensors")
SIZES = [0, 1, 7, 8, 9, 31, 33, 63, 64, 65, 128, 200]

isas = pytest.mark.parametrize("isa", kernels_ext.available_isas())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def bits(t: Tensor) -> Tensor:
    """The elements' bits, so that NaN equals itself and -0.0 differs from 0.0."""
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(bits(got), bits(want))


def assert_matches_reference(packed: BitmapWeight, dense: Tensor) -> None:
    want = reference.pack(bits(dense).numpy())
    assert torch.equal(packed.bitmap, torch.from_numpy(want.bitmap))
    assert torch.equal(packed.row_offsets, torch.from_numpy(want.row_offsets))
    assert torch.equal(bits(packed.values), torch.from_numpy(want.values))


# --- round trips --------------------------------------------------------------------------------------------


@isas
@pytest.mark.parametrize("name", EDGES)
def test_edge_matrices_survive_bit_for_bit(name: str, isa: str) -> None:
    """NaN payloads, -0.0, infinities and subnormals are stored and returned as they are."""
    dense = EDGES[name]

    packed = bitmap_pack(dense, isa).validate()

    assert_matches_reference(packed, dense)
    assert_same_bits(bitmap_unpack(packed, isa=isa), dense)


@isas
@dtypes
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_every_size_survives(sparsity: float, dtype: torch.dtype, isa: str, matrices) -> None:
    """Rows, words, bytes and vectors end everywhere."""
    for K in SIZES:
        for N in (0, 1, 3, 8):
            dense = matrices.pruned(N, K, sparsity, dtype)

            packed = bitmap_pack(dense, isa).validate()

            assert_same_bits(bitmap_unpack(packed, isa=isa), dense)
            assert packed.nnz == int(torch.count_nonzero(dense))


@isas
@given(
    dense=npst.arrays(
        st.sampled_from([np.int16, np.int32]),
        st.tuples(st.integers(0, 6), st.integers(0, 140)),
        elements=st.sampled_from([0, 0, 1, -1, -(2**15), 2**15 - 1]),
    )
)
@settings(max_examples=60, deadline=None)
def test_any_bits_survive_and_match_the_reference(isa: str, dense: np.ndarray) -> None:
    """The format never looks at what the bits mean."""
    want = torch.from_numpy(dense).view(torch.float32 if dense.dtype == np.int32 else torch.bfloat16)

    packed = bitmap_pack(want, isa).validate()

    assert_matches_reference(packed, want)
    assert_same_bits(bitmap_unpack(packed, isa=isa), want)
    assert np.array_equal(reference.unpack(reference.pack(dense)), dense)


def test_a_transposed_matrix_is_packed_as_it_reads(matrices) -> None:
    dense = matrices.pruned(70, 40, 0.5, torch.bfloat16).T
    assert torch.equal(bitmap_unpack(bitmap_pack(dense)), dense)


def test_many_threads_write_what_one_writes(matrices) -> None:
    """The matrix is large enough to be shared out over threads."""
    dense = matrices.pruned(700, 600, 0.5, torch.bfloat16)
    packed = bitmap_pack(dense).validate()
    assert torch.equal(bitmap_unpack(packed), dense)
    parts = [bitmap_pack(dense[n : n + 1]) for n in (0, 349, 350, 699)]
    for n, part in zip((0, 349, 350, 699), parts, strict=True):
        begin, end = packed.row_offsets[n : n + 2].tolist()
        assert torch.equal(packed.values[begin:end], part.values)


@isas
def test_a_weight_is_packed_into_the_room_it_is_given(isa: str, matrices) -> None:
    """A loader chooses where weights lie; what lay there before does not matter."""
    dense = matrices.pruned(150, 203, 0.5, torch.bfloat16)
    want = bitmap_pack(dense)
    room = BitmapWeight(
        150,
        203,
        torch.full_like(want.bitmap, 0xFF),
        torch.full_like(want.values, 7.0),
        torch.full_like(want.row_offsets, -1),
    )

    assert bitmap_pack(dense, isa, out=room) is room

    assert_matches_reference(room.validate(), dense)


@pytest.mark.parametrize("change", [-1, 1])
def test_room_for_another_number_of_elements_is_refused(change: int, matrices) -> None:
    """Else the kernel would write past the end, or leave what was there."""
    dense = matrices.pruned(5, 70, 0.5, torch.float32)
    want = bitmap_pack(dense)
    room = BitmapWeight(5, 70, want.bitmap, torch.zeros(want.nnz + change), want.row_offsets)
    with pytest.raises(
        ValueError, match=f"values has shape .{want.nnz + change}., but dimension 0 must be {want.nnz} "
    ):
        bitmap_pack(dense, out=room)


def test_room_of_another_shape_or_dtype_is_refused(matrices) -> None:
    room = bitmap_pack(matrices.pruned(5, 70, 0.5, torch.float32))
    for other in (matrices.pruned(70, 5, 0.5, torch.float32), matrices.pruned(5, 70, 0.5, torch.bfloat16)):
        with pytest.raises(ValueError, match="bitmap_pack: out must be"):
            bitmap_pack(other, out=room)


# --- the specification --------------------------------------------------------------------------------------


def test_the_example_of_the_specification_holds() -> None:
    """BITMAP.md gives these bytes."""
    dense = torch.zeros(2, 10, dtype=torch.bfloat16)
    dense[0, 1], dense[0, 7], dense[0, 9], dense[1, 8] = 1.5, -2, 0.5, -0.0

    packed = bitmap_pack(dense)

    assert packed.bitmap.numpy().tobytes().hex(" ") == "82 02 00 01"
    assert packed.values.view(torch.uint8).numpy().tobytes().hex(" ") == "c0 3f 00 c0 00 3f 00 80"
    assert packed.row_offsets.tolist() == [0, 3, 4]
    assert packed.stored_bytes == 2 * 2 + 4 * 2 + 8 * 3
    assert packed.dense_bytes == 40
    assert packed.sparsity == pytest.approx(0.8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_golden_files_read_and_write_the_same(dtype: str) -> None:
    """A change of the format must change its version and these files."""
    stored = {
        suffix: GOLDEN[f"{dtype}.{suffix}"] for suffix in ("bitmask", "compressed", "row_offsets", "shape")
    }

    weight = reference.from_checkpoint(**stored, name="layer")

    assert_same_bits(bitmap_unpack(weight), GOLDEN[f"{dtype}.dense"])
    written = reference.to_checkpoint(bitmap_pack(GOLDEN[f"{dtype}.dense"]))
    assert written.keys() == stored.keys()
    for suffix, tensor in written.items():
        assert tensor.dtype == stored[suffix].dtype
        assert torch.equal(tensor.view(torch.uint8), stored[suffix].view(torch.uint8))


# --- corrupted data -----------------------------------------------------------------------------------------


def weight(N: int = 4, K: int = 13) -> BitmapWeight:
    return bitmap_pack((torch.arange(N * K).reshape(N, K) % 3).to(torch.bfloat16))


def with_bitmap(change: Callable[[Tensor], None]) -> BitmapWeight:
    good = weight()
    bitmap = good.bitmap.clone()
    change(bitmap)
    return dataclasses.replace(good, bitmap=bitmap)


def test_a_flipped_bit_is_refused() -> None:
    def flip(bitmap: Tensor) -> None:
        bitmap[2, 0] ^= 1

    with pytest.raises(ValueError, match=r"row 2 has \d bits set, but row_offsets give it \d values"):
        with_bitmap(flip).validate()


def test_a_moved_bit_in_the_padding_is_refused() -> None:
    """The count agrees, so only the padding shows it."""

    def move(bitmap: Tensor) -> None:
        assert bitmap[1, 1] & 2
        bitmap[1, 1] ^= 0b1000_0010

    with pytest.raises(ValueError, match="row 1 has bits set beyond column 12"):
        with_bitmap(move).validate()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 8, 17, 26, 34], "must start with 0"),
        ([0, 8, 17, 26, 33], "row_offsets end with 33, but there are 34 values"),
        ([0, 17, 8, 26, 34], "row 0 has 8 bits set, but row_offsets give it 17"),
        ([0, 9, 17, 26, 34], "row 0 has 8 bits set, but row_offsets give it 9"),
        ([0, -(2**62), 17, 26, 34], "row 0 has 8 bits set"),
    ],
)
def test_wrong_offsets_are_refused(offsets: list[int], message: str) -> None:
    good = weight()
    assert good.row_offsets.tolist() == [0, 8, 17, 26, 34]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, row_offsets=torch.tensor(offsets)).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": 17}, r"bitmap must have shape \(4, 3\), got \(4, 2\)"),
        ({"N": 3}, r"bitmap must have shape \(3, 2\)"),
        ({"N": -1}, "at least 0"),
        ({"bitmap": torch.zeros(4, 2, dtype=torch.int8)}, "bitmap must be torch.uint8"),
        ({"bitmap": torch.zeros(2, 4, dtype=torch.uint8).T}, "bitmap must be contiguous"),
        ({"values": torch.zeros(34, dtype=torch.float64)}, "values must be torch.float32 or"),
        ({"values": torch.zeros(17, 2)}, "values must be 1-D"),
        ({"row_offsets": torch.zeros(4, dtype=torch.int64)}, r"row_offsets must have shape \(5,\)"),
        ({"row_offsets": torch.zeros(5, dtype=torch.int32)}, "row_offsets must be torch.int64"),
    ],
)
def test_wrong_shapes_and_types_are_refused_at_construction(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weight(), **change)


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        ("shape", torch.tensor([4, 13], dtype=torch.int32), "layer.shape must be int64"),
        ("row_offsets", torch.zeros(5, dtype=torch.int64), r"layer.row_offsets must be int64 \[4\]"),
        ("compressed", torch.zeros(33, dtype=torch.bfloat16), "layer: .*row 3"),
        ("bitmask", torch.zeros(4, 3, dtype=torch.uint8), "layer: .*bitmap must have shape"),
    ],
)
def test_a_corrupted_checkpoint_is_refused_by_name(suffix: str, tensor: Tensor, message: str) -> None:
    stored = {**reference.to_checkpoint(weight()), suffix: tensor}
    with pytest.raises(ValueError, match=message):
        reference.from_checkpoint(**stored, name="layer")


def test_ops_refuse_what_does_not_fit_without_the_wrapper() -> None:
    """A direct call through torch.ops is checked as well, though it cannot see inside the rows."""
    good = weight()
    ops = torch.ops.kernels_ext
    x = torch.zeros(1, 13, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="row_offsets ends with 34, but values has 33"):
        ops.bitmap_linear(x, good.bitmap, good.values[:33], good.row_offsets)
    with pytest.raises(ValueError, match="x must be BFloat16, got Float"):
        ops.bitmap_linear(x.float(), good.bitmap, good.values, good.row_offsets)
    with pytest.raises(ValueError, match="dense must be float32, bfloat16 or float16, got Double"):
        ops.bitmap_pack(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="isa must be 0"):
        ops.bitmap_linear(x, good.bitmap, good.values, good.row_offsets, None, 9)


# --- registration -------------------------------------------------------------------------------------------


def test_ops_are_registered_correctly() -> None:
    ops = torch.ops.kernels_ext
    good = weight()
    opcheck(ops.bitmap_pack.default, (bitmap_unpack(good),))
    opcheck(
        ops.bitmap_pack_into.default,
        (
            bitmap_unpack(good),
            torch.empty_like(good.bitmap),
            torch.empty_like(good.values),
            torch.empty_like(good.row_offsets),
        ),
    )
    opcheck(ops.bitmap_row_counts.default, (good.bitmap,))
    opcheck(
        ops.bitmap_unpack_into.default,
        (torch.empty(4, 13, dtype=torch.bfloat16), good.bitmap, good.values, good.row_offsets),
    )
    opcheck(ops.read_checksum.default, (torch.arange(1000),))


def test_read_checksum_reads_every_word() -> None:
    """Else the measured bandwidth would be a lie."""
    words = torch.randint(-(2**62), 2**62, (40_003,), generator=torch.Generator().manual_seed(1))
    want = np.bitwise_xor.reduce(words.numpy())
    assert int(torch.ops.kernels_ext.read_checksum(words)) == int(want)


def test_measured_bandwidth_is_plausible() -> None:
    assert 1e8 < kernels_ext.measure_read_bandwidth(0.0) < 1e13
