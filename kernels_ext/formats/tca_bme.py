"""TCA-BME, the bitmap format that feeds tensor cores: packer, unpacker and validator (TCA_BME.md).

`pack_reference` and `unpack_reference` are the page in slow, obvious loops; `pack` and `unpack` give the same
bits at the speed of tensor operations, on any device.

Source: SpInfer (EuroSys '25), sections 4.1-4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

DTYPES: Final = (torch.float16, torch.bfloat16)

BITMAP_TILE: Final = 8
TC_TILE: Final = 16
GROUP_TILE: Final = 64
TILES_PER_GROUP: Final = (GROUP_TILE // BITMAP_TILE) ** 2
STRIPS_PER_GROUP: Final = GROUP_TILE // TC_TILE
# A GroupTile's values start on 16 bytes.
VALUE_ALIGNMENT: Final = 8

_MAX_VALUES: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class TcaBme:
    """An ``[N, K]`` matrix in TCA-BME.

    Construction checks what costs nothing to check: dtypes, shapes, layout. Call `validate` on anything that
    was not made by `pack`: the kernels trust the contents.

    Attributes:
        N: rows, the layer's out features; at least 1.
        K: columns, the layer's in features; at least 1.
        bitmaps: int64 ``[G, 64]``, the bits of unsigned words: one 8x8 tile each. G is the number of 64x64
            GroupTiles.
        values: ``[V]`` float16 or bfloat16: the stored elements, zero-padded to multiples of 8 per GroupTile.
        group_offsets: int32 ``[G + 1]``; GroupTile g owns ``values[group_offsets[g]:group_offsets[g + 1]]``.
        strip_offsets: int32 ``[G, 4]``: values of the GroupTile before each of its 16-row strips.
        max_group_values: the most values that a GroupTile owns, padding included.

    Raises:
        ValueError: a shape, dtype, device or layout above does not hold.
    """

    N: int
    K: int
    bitmaps: Tensor
    values: Tensor
    group_offsets: Tensor
    strip_offsets: Tensor
    max_group_values: int

    def __post_init__(self) -> None:
        if self.N < 1 or self.K < 1:
            raise ValueError(f"TcaBme: N and K must be at least 1, got N={self.N} K={self.K}")
        G = self.groups
        int32, int64 = (torch.int32,), (torch.int64,)
        for name, tensor, dtypes, shape in (
            ("bitmaps", self.bitmaps, int64, (G, TILES_PER_GROUP)),
            ("values", self.values, DTYPES, (self.values.numel(),)),
            ("group_offsets", self.group_offsets, int32, (G + 1,)),
            ("strip_offsets", self.strip_offsets, int32, (G, STRIPS_PER_GROUP)),
        ):
            if tensor.dtype not in dtypes:
                wanted = " or ".join(str(d) for d in dtypes)
                raise ValueError(f"{self._where}: {name} must be {wanted}, got {tensor.dtype}")
            if tensor.shape != shape:
                raise ValueError(f"{self._where}: {name} must have shape {shape}, got {tuple(tensor.shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{self._where}: {name} must be contiguous, got strides {tensor.stride()}")
            if tensor.device != self.values.device:
                raise ValueError(
                    f"{self._where}: {name} is on {tensor.device}, but values are on {self.values.device}"
                )
        if self.values.numel() > _MAX_VALUES:
            raise ValueError(
                f"{self._where}: int32 offsets reach {_MAX_VALUES} values, got {self.values.numel()}"
            )

    def validate(self) -> TcaBme:
        """Check that bitmaps, offsets and values agree, so that the kernels can trust them; returns self.

        Reads the bitmaps, the offsets and the values' padding.

        Raises:
            ValueError: they disagree; the message names the first GroupTile at fault.
        """
        where = self._where
        offsets = self.group_offsets.long()
        if int(offsets[0]) != 0:
            raise ValueError(f"{where}: group_offsets must start with 0, got {int(offsets[0])}")
        if int(offsets[-1]) != self.values.numel():
            raise ValueError(
                f"{where}: group_offsets end with {int(offsets[-1])}, "
                f"but there are {self.values.numel()} values"
            )
        strip_counts = _set_bits(self.bitmaps).view(-1, STRIPS_PER_GROUP, 16).sum(-1)
        counts = strip_counts.sum(-1)
        sizes = _aligned(counts)
        self._reject_where(
            offsets.diff() != sizes,
            lambda g: (
                f"has {int(counts[g])} bits set, so it must own {int(sizes[g])} values, "
                f"but group_offsets give it {int(offsets[g + 1] - offsets[g])}"
            ),
        )
        strips = strip_counts.cumsum(-1) - strip_counts
        self._reject_where(
            (self.strip_offsets != strips).any(-1),
            lambda g: f"must have strip_offsets {strips[g].tolist()}, got {self.strip_offsets[g].tolist()}",
        )
        outside = self.bitmaps & ~_bits_inside(self.N, self.K, self.bitmaps.device)
        self._reject_where(
            (outside != 0).any(-1),
            lambda g: f"has bits set outside of the matrix, in BitmapTile {int(outside[g].nonzero()[0])}",
        )
        largest = int(sizes.max())
        if self.max_group_values != largest:
            raise ValueError(
                f"{where}: max_group_values is {self.max_group_values}, "
                f"but the fullest GroupTile has {largest}"
            )
        if self.values.numel():
            # Candidates are the 7 values after a GroupTile's last; those that it owns are its padding.
            index = (offsets[:-1] + counts)[:, None] + torch.arange(VALUE_ALIGNMENT - 1, device=self.device)
            owned = index < offsets[1:, None]
            bits = self.values.view(torch.int16)[index.clamp(max=self.values.numel() - 1)]
            self._reject_where(
                (owned & (bits != 0)).any(-1), lambda g: "has padding values that are not zero"
            )
        return self

    def _reject_where(self, bad: Tensor, describe: Callable[[int], str]) -> None:
        """Raise ValueError about the first GroupTile where `bad` (one bool each) holds."""
        groups = bad.nonzero()
        if len(groups):
            g = int(groups[0])
            row, column = (GROUP_TILE * i for i in divmod(g, _groups_along(self.K)))
            raise ValueError(
                f"{self._where}: GroupTile {g} (row {row}, column {column}) {describe(g)} "
                f"({len(groups)} of {self.groups} GroupTiles are wrong)"
            )

    @property
    def _where(self) -> str:
        return f"TcaBme N={self.N} K={self.K}"

    @property
    def groups(self) -> int:
        """GroupTiles, G."""
        return _groups_along(self.N) * _groups_along(self.K)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values, and so of x and y."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where all four tensors are."""
        return self.values.device

    @property
    def nnz(self) -> int:
        """Stored elements, padding not counted. Reads the bitmaps."""
        return int(_set_bits(self.bitmaps).sum())

    @property
    def stored_bytes(self) -> int:
        """Bytes of the four tensors together."""
        tensors = (self.bitmaps, self.values, self.group_offsets, self.strip_offsets)
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same matrix stored densely."""
        return self.N * self.K * self.values.element_size()


def pack(dense: Tensor) -> TcaBme:
    """Pack a dense matrix. An element is stored unless all its bits are zero, so -0.0 is stored.

    Works on the matrix's device, 64 rows at a time.

    Args:
        dense: ``[N, K]`` float16 or bfloat16, N and K at least 1; any strides.

    Raises:
        ValueError: a shape or dtype above does not hold, or more than 2^31 - 1 values would be stored.
    """
    _check_dense(dense)
    N, K = dense.shape
    GN, GK = _groups_along(N), _groups_along(K)
    device = dense.device
    bitmaps = torch.empty(GN, GK, TILES_PER_GROUP, dtype=torch.int64, device=device)
    strip_counts = torch.empty(GN, GK, STRIPS_PER_GROUP, dtype=torch.int64, device=device)
    values = []
    for gn in range(GN):
        rows = dense[gn * GROUP_TILE : (gn + 1) * GROUP_TILE].contiguous().view(torch.int16)
        padded = rows.new_zeros(GROUP_TILE, GK * GROUP_TILE)
        padded[: len(rows), :K] = rows
        elements = _tile_order(padded)
        stored = elements != 0
        bitmaps[gn] = _pack_bits(stored)
        strip_counts[gn] = stored.view(GK, STRIPS_PER_GROUP, -1).sum(-1)

        counts = strip_counts[gn].sum(-1)
        sizes = _aligned(counts)
        # What a GroupTile's values move up because of the padding of those before it.
        shift = (sizes - counts).cumsum(0) - (sizes - counts)
        packed = elements[stored]
        position = torch.arange(len(packed), device=device) + shift.repeat_interleave(counts)
        row_values = packed.new_zeros(int(sizes.sum()))
        row_values[position] = packed
        values.append(row_values)

    sizes = _aligned(strip_counts.sum(-1)).flatten()
    total = int(sizes.sum())
    if total > _MAX_VALUES:
        raise ValueError(
            f"tca_bme.pack: int32 offsets reach {_MAX_VALUES} values, but this matrix needs {total}"
        )
    group_offsets = torch.zeros(GN * GK + 1, dtype=torch.int32, device=device)
    group_offsets[1:] = sizes.cumsum(0)
    strip_offsets = (strip_counts.cumsum(-1) - strip_counts).view(GN * GK, STRIPS_PER_GROUP)
    return TcaBme(
        N,
        K,
        bitmaps.view(GN * GK, TILES_PER_GROUP),
        torch.cat(values).view(dense.dtype),
        group_offsets,
        strip_offsets.int(),
        int(sizes.max()),
    )


def unpack(weight: TcaBme) -> Tensor:
    """The dense ``[N, K]`` matrix of a valid weight, bit for bit what was packed, on the weight's device."""
    GN, GK = _groups_along(weight.N), _groups_along(weight.K)
    bits = weight.values.view(torch.int16)
    offsets = weight.group_offsets.long()
    dense = torch.empty(weight.N, weight.K, dtype=torch.int16, device=weight.device)
    for gn in range(GN):
        stored = _unpack_bits(weight.bitmaps[gn * GK : (gn + 1) * GK])
        counts = stored.flatten(1).sum(-1)
        starts = offsets[gn * GK : (gn + 1) * GK]
        # The values of a GroupTile lie from its start on; the padding after them is skipped.
        rank = counts.cumsum(0) - counts
        index = torch.arange(int(counts.sum()), device=weight.device)
        index += (starts - rank).repeat_interleave(counts)
        elements = torch.zeros(stored.shape, dtype=torch.int16, device=weight.device)
        elements[stored] = bits[index]
        rows = dense[gn * GROUP_TILE : (gn + 1) * GROUP_TILE]
        rows.copy_(_row_order(elements)[: len(rows), : weight.K])
    return dense.view(weight.dtype)


def pack_reference(dense: Tensor) -> TcaBme:
    """What `pack` returns, computed one element at a time as TCA_BME.md says it. CPU tensors only."""
    _check_dense(dense)
    N, K = dense.shape
    GN, GK = _groups_along(N), _groups_along(K)
    element = dense.contiguous().view(torch.int16).tolist()
    bitmaps: list[list[int]] = []
    values: list[int] = []
    group_offsets = [0]
    strip_offsets: list[list[int]] = []
    for gn in range(GN):
        for gk in range(GK):
            group_bitmaps: list[int] = []
            group_strips: list[int] = []
            for tile in range(TILES_PER_GROUP):
                if tile % 16 == 0:
                    group_strips.append(len(values) - group_offsets[-1])
                first_row, first_column = _tile_origin(gn, gk, tile)
                bitmap = 0
                for bit in range(BITMAP_TILE * BITMAP_TILE):
                    n, k = first_row + bit // BITMAP_TILE, first_column + bit % BITMAP_TILE
                    if n < N and k < K and element[n][k] != 0:
                        bitmap |= 1 << bit
                        values.append(element[n][k])
                # torch.int64 holds the bits of the unsigned word.
                group_bitmaps.append(bitmap - (1 << 64) if bitmap >> 63 else bitmap)
            while len(values) % VALUE_ALIGNMENT:
                values.append(0)
            bitmaps.append(group_bitmaps)
            strip_offsets.append(group_strips)
            group_offsets.append(len(values))
    return TcaBme(
        N,
        K,
        torch.tensor(bitmaps, dtype=torch.int64),
        torch.tensor(values, dtype=torch.int16).view(dense.dtype),
        torch.tensor(group_offsets, dtype=torch.int32),
        torch.tensor(strip_offsets, dtype=torch.int32),
        max(b - a for a, b in pairwise(group_offsets)),
    )


def unpack_reference(weight: TcaBme) -> Tensor:
    """What `unpack` returns, computed one element at a time as TCA_BME.md says it. CPU tensors only."""
    GK = _groups_along(weight.K)
    values = weight.values.view(torch.int16).tolist()
    dense = torch.zeros(weight.N, weight.K, dtype=torch.int16)
    for g, group_bitmaps in enumerate(weight.bitmaps.tolist()):
        position = int(weight.group_offsets[g])
        for tile, bitmap in enumerate(group_bitmaps):
            first_row, first_column = _tile_origin(*divmod(g, GK), tile)
            for bit in range(BITMAP_TILE * BITMAP_TILE):
                if bitmap >> bit & 1:
                    n, k = first_row + bit // BITMAP_TILE, first_column + bit % BITMAP_TILE
                    dense[n, k] = values[position]
                    position += 1
    return dense.view(weight.dtype)


def _groups_along(size: int) -> int:
    return -(-size // GROUP_TILE)


def _tile_origin(gn: int, gk: int, tile: int) -> tuple[int, int]:
    """Row and column in the matrix of a BitmapTile's first element."""
    row = TC_TILE * (tile // 16) + BITMAP_TILE * (tile % 2)
    column = TC_TILE * (tile % 16 // 4) + BITMAP_TILE * (tile % 4 // 2)
    return gn * GROUP_TILE + row, gk * GROUP_TILE + column


def _tile_order(padded: Tensor) -> Tensor:
    """A row of GroupTiles, ``[64, GK * 64]``, as ``[GK, 64 tiles, 64 elements]`` in the format's order."""
    # Rows split into strip, upper or lower BitmapTile, row of the tile; columns likewise.
    split = padded.view(STRIPS_PER_GROUP, 2, BITMAP_TILE, -1, GROUP_TILE // TC_TILE, 2, BITMAP_TILE)
    return split.permute(3, 0, 4, 5, 1, 2, 6).reshape(-1, TILES_PER_GROUP, BITMAP_TILE**2)


def _row_order(elements: Tensor) -> Tensor:
    """The inverse of `_tile_order`."""
    GK = len(elements)
    split = elements.view(GK, STRIPS_PER_GROUP, GROUP_TILE // TC_TILE, 2, 2, BITMAP_TILE, BITMAP_TILE)
    return split.permute(1, 4, 5, 0, 2, 3, 6).reshape(GROUP_TILE, GK * GROUP_TILE)


def _pack_bits(stored: Tensor) -> Tensor:
    """Bools ``[..., 64]`` as int64 words ``[...]``, the first element in the least significant bit."""
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=stored.device)
    octets = (stored.view(*stored.shape[:-1], 8, 8) * weights).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64).squeeze(-1)


def _unpack_bits(words: Tensor) -> Tensor:
    """The inverse of `_pack_bits`."""
    octets = words.contiguous().unsqueeze(-1).view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return (octets[..., None] >> shifts & 1).bool().flatten(-2)


def _set_bits(words: Tensor) -> Tensor:
    """The number of bits set in each int64 word ``[...]``, as int64 ``[...]``."""
    table = torch.tensor([i.bit_count() for i in range(256)], dtype=torch.int64, device=words.device)
    return table[words.unsqueeze(-1).view(torch.uint8).long()].sum(-1)


def _aligned(counts: Tensor) -> Tensor:
    return (counts + VALUE_ALIGNMENT - 1) // VALUE_ALIGNMENT * VALUE_ALIGNMENT


def _bits_inside(N: int, K: int, device: torch.device) -> Tensor:
    """For each bitmap of an ``[N, K]`` matrix the bits of elements inside it: int64 ``[G, 64]``."""
    GN, GK = _groups_along(N), _groups_along(K)
    origins = torch.tensor([_tile_origin(0, 0, tile) for tile in range(TILES_PER_GROUP)], device=device)
    rows = N - (GROUP_TILE * torch.arange(GN, device=device)[:, None] + origins[:, 0])
    columns = K - (GROUP_TILE * torch.arange(GK, device=device)[:, None] + origins[:, 1])
    i = torch.arange(BITMAP_TILE, device=device)
    # A tile has 0 to 8 rows and 0 to 8 columns inside: one mask for each pair.
    masks = torch.empty(BITMAP_TILE + 1, BITMAP_TILE + 1, dtype=torch.int64, device=device)
    for r in range(BITMAP_TILE + 1):
        for c in range(BITMAP_TILE + 1):
            masks[r, c] = _pack_bits(((i[:, None] < r) & (i < c)).flatten())
    rows, columns = rows.clamp(0, BITMAP_TILE), columns.clamp(0, BITMAP_TILE)
    return masks[rows[:, None], columns[None]].view(GN * GK, TILES_PER_GROUP)


def _check_dense(dense: Tensor) -> None:
    if dense.dim() != 2 or 0 in dense.shape:
        raise ValueError(
            f"tca_bme.pack: dense must be [N, K] with N and K at least 1, got shape {tuple(dense.shape)}"
        )
    if dense.dtype not in DTYPES:
        raise ValueError(f"tca_bme.pack: dense must be float16 or bfloat16, got {dense.dtype}")
