"""2:4 semi-structured weights: the slow reference and the validator (SEMI_STRUCTURED.md).

Values are 16-bit patterns (numpy uint16), of float16 or bfloat16 alike.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

ROW_TILES: Final = 2
STEPS: Final = 4
STRIP_ROWS: Final = 16 * ROW_TILES
GROUP_COLUMNS: Final = 32 * STEPS
VALUE_BYTES: Final = ROW_TILES * STEPS * 512
GROUP_BYTES: Final = VALUE_BYTES + 512

Bits = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


def group_count(N: int, K: int) -> int:
    """Groups of an ``[N, K]`` matrix."""
    return -(-N // STRIP_ROWS) * -(-K // GROUP_COLUMNS)


def choose_pair(quad: list[int]) -> tuple[int, int, int, int]:
    """Of four elements the two that are stored: lower index, upper index, and their values.

    Raises:
        ValueError: more than two elements are not zero.
    """
    kept = [i for i, value in enumerate(quad) if value & 0x7FFF]
    if len(kept) > 2:
        raise ValueError(f"{len(kept)} of 4 elements are not zero")
    if len(kept) == 2:
        low, high = kept
    elif not kept:
        low, high = 0, 1
    elif kept[0] < 3:
        low, high = kept[0], 3
    else:
        low, high = 0, 3
    values = [value if value & 0x7FFF else 0 for value in quad]
    return low, high, values[low], values[high]


def pack(dense: Bits) -> Bytes:
    """Pack a matrix.

    Args:
        dense: ``[N, K]`` bit patterns, N, K >= 1.

    Raises:
        ValueError: the shape does not hold, or four neighbours have more than two non-zeros.
    """
    if dense.ndim != 2 or 0 in dense.shape:
        raise ValueError(f"semi_structured: dense must be [N, K] with N, K >= 1, got shape {dense.shape}")
    N, K = dense.shape
    strips, columns = -(-N // STRIP_ROWS), -(-K // GROUP_COLUMNS)
    padded = np.zeros((strips * STRIP_ROWS, columns * GROUP_COLUMNS), np.uint16)
    padded[:N, :K] = dense
    out = np.zeros((strips * columns, GROUP_BYTES), np.uint8)
    for group in range(strips * columns):
        first_row, first_column = group // columns * STRIP_ROWS, group % columns * GROUP_COLUMNS
        values = np.zeros((STEPS, ROW_TILES, 32, 8), np.uint16)
        metadata = np.zeros((32, STEPS // 2 * ROW_TILES), np.uint32)
        for step in range(STEPS):
            for tile in range(ROW_TILES):
                for row in range(16):
                    for quad in range(8):
                        at_row = first_row + tile * 16 + row
                        at_column = first_column + step * 32 + quad * 4
                        elements = [int(v) for v in padded[at_row, at_column : at_column + 4]]
                        try:
                            low, high, low_value, high_value = choose_pair(elements)
                        except ValueError as error:
                            raise ValueError(
                                f"semi_structured: row {at_row}, columns {at_column} to {at_column + 3}: "
                                f"{error}"
                            ) from None
                        register = row // 8 + quad // 4 * 2
                        lane = row % 8 * 4 + quad % 4
                        values[step, tile, lane, register * 2 : register * 2 + 2] = low_value, high_value
                        holder = row % 8 * 4 + step % 2 * 2 + quad // 4
                        shift = quad % 4 * 4 + row // 8 * 16
                        metadata[holder, step // 2 * ROW_TILES + tile] |= np.uint32(
                            (low | high << 2) << shift
                        )
        out[group, :VALUE_BYTES] = values.view(np.uint8).reshape(-1)
        out[group, VALUE_BYTES:] = metadata.view(np.uint8).reshape(-1)
    return out.reshape(-1)


def unpack(data: Bytes, N: int, K: int) -> Bits:
    """The dense ``[N, K]`` matrix of valid data."""
    columns = -(-K // GROUP_COLUMNS)
    groups = data.reshape(group_count(N, K), GROUP_BYTES)
    dense = np.zeros((-(-N // STRIP_ROWS) * STRIP_ROWS, columns * GROUP_COLUMNS), np.uint16)
    for group in range(len(groups)):
        values = groups[group, :VALUE_BYTES].copy().view(np.uint16).reshape(STEPS, ROW_TILES, 32, 8)
        for step in range(STEPS):
            for tile in range(ROW_TILES):
                for row in range(16):
                    for quad in range(8):
                        low, high = _pair(groups[group], step, tile, row, quad)
                        lane, register = row % 8 * 4 + quad % 4, row // 8 + quad // 4 * 2
                        pair = values[step, tile, lane, register * 2 : register * 2 + 2]
                        at_row = group // columns * STRIP_ROWS + tile * 16 + row
                        at_column = group % columns * GROUP_COLUMNS + step * 32 + quad * 4
                        dense[at_row, at_column + low], dense[at_row, at_column + high] = pair
    return dense[:N, :K].copy()


def _pair(group: Bytes, step: int, tile: int, row: int, quad: int) -> tuple[int, int]:
    metadata = group[VALUE_BYTES:].copy().view(np.uint32).reshape(32, STEPS // 2 * ROW_TILES)
    word = int(metadata[row % 8 * 4 + step % 2 * 2 + quad // 4, step // 2 * ROW_TILES + tile])
    indices = word >> (quad % 4 * 4 + row // 8 * 16) & 15
    return indices & 3, indices >> 2


def validate(data: Bytes, N: int, K: int) -> None:
    """Check everything that the kernels trust.

    Raises:
        ValueError: the size is wrong, a pair's indices do not ascend, or an element outside ``[N, K]`` is not
            zero.
    """
    want = group_count(N, K) * GROUP_BYTES
    if data.dtype != np.uint8 or data.shape != (want,):
        raise ValueError(
            f"semi_structured N={N} K={K}: data must be uint8 [{want}], got {data.dtype} {data.shape}"
        )
    groups = data.reshape(-1, GROUP_BYTES)
    words = np.ascontiguousarray(groups[:, VALUE_BYTES:]).view(np.uint32)
    for shift in range(0, 32, 4):
        indices = words >> np.uint32(shift)
        bad = (indices & 3) >= (indices >> np.uint32(2) & 3)
        if bad.any():
            group = int(np.argwhere(bad)[0][0])
            raise ValueError(
                f"semi_structured N={N} K={K}: group {group} has a pair of indices that do not ascend"
            )
    padded_N, padded_K = -(-N // STRIP_ROWS) * STRIP_ROWS, -(-K // GROUP_COLUMNS) * GROUP_COLUMNS
    if (padded_N, padded_K) != (N, K):
        dense = unpack(data, padded_N, padded_K)
        if dense[N:].any() or dense[:, K:].any():
            raise ValueError(f"semi_structured N={N} K={K}: an element outside of the matrix is not zero")
