"""Lane streams: the weight format of the small-M CUDA kernels, specified in LANE_STREAM.md.

This module is the slow, obvious side: the plan that cuts a matrix into streams, a packer and an unpacker that
follow the specification step by step, and a validator. The GPU packer must produce the same bytes.

Letters: ``y[M, N] = x[M, K] @ W[N, K].T``. Elements are 16 bits wide (fp16 or bf16), handled as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

STRIP_ROWS: Final = 32
TILE_COLUMNS: Final = 64
ROW_BYTES: Final = 128
GUARD_ROWS: Final = 16
HEADER_BYTES: Final = 128
REFILL_OFFSET: Final = 64
REFILL_BYTES: Final = 16
MIRROR: Final = 1
EXCHANGE: Final = 2
DESCRIPTOR_WORDS: Final = 12
MAX_LOOKAHEAD: Final = 4
MAX_STRIPS: Final = 65536
# Of the workspace: one for every strip that a plan may have, wherever the partial sums of a layer begin.
COUNTER_BYTES: Final = MAX_STRIPS * 4
MAX_WARPS: Final = 16
MAX_TOKENS: Final = 16  # of one launch of the kernel for few tokens
MAX_BATCH_TOKENS: Final = 96  # of one launch of the kernel for many
MIN_RING_ROWS: Final = GUARD_ROWS
MAX_RING_ROWS: Final = 4096

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStreamPlan:
    """How an ``[N, K]`` matrix is cut into streams, one for each warp of a launch.

    Attributes:
        group_tiles: tiles of 64 columns in a group, 2 or 4. A group is 32 rows by that many columns.
        k_slices: K is cut into this many equal slices of whole groups; the last may end in columns past K.
        blocks_per_slice: thread blocks that share a slice.
        warps_per_block: warps of a block, 1 to 16; each owns one stream.
        lookahead: transfers in flight ahead of the one being decoded, 1 to 4.
        ring_rows: rows of a warp's value ring. The packer finds it; before that it is the least there is.

    Raises:
        ValueError: a number is out of its range.
    """

    N: int
    K: int
    group_tiles: int
    k_slices: int
    blocks_per_slice: int
    warps_per_block: int
    lookahead: int
    ring_rows: int = MIN_RING_ROWS

    def __post_init__(self) -> None:
        for name, least, most in (
            ("N", 1, MAX_STRIPS * STRIP_ROWS),
            ("K", 1, 2**31 - 1),
            ("group_tiles", 2, 4),
            ("k_slices", 1, 4096),
            ("blocks_per_slice", 1, 65536),
            ("warps_per_block", 1, MAX_WARPS),
            ("lookahead", 1, MAX_LOOKAHEAD),
            ("ring_rows", MIN_RING_ROWS, MAX_RING_ROWS),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"LaneStreamPlan: {name} must be {least} to {most}, got {value}")
        if self.group_tiles == 3:
            raise ValueError("LaneStreamPlan: group_tiles must be 2 or 4, got 3")
        if self.blocks_per_slice > self.slice_groups:
            raise ValueError(
                f"LaneStreamPlan: a slice has {self.blocks_per_slice} blocks, "
                f"but only {self.slice_groups} groups for each warp"
            )

    @property
    def numbers(self) -> list[int]:
        """The plan as the ops take it."""
        return [
            self.N,
            self.K,
            self.group_tiles,
            self.k_slices,
            self.blocks_per_slice,
            self.warps_per_block,
            self.lookahead,
            self.ring_rows,
        ]

    @property
    def strips(self) -> int:
        """Strips of 32 rows; the last may end in rows past N."""
        return -(-self.N // STRIP_ROWS)

    @property
    def group_columns(self) -> int:
        """Columns of a group."""
        return self.group_tiles * TILE_COLUMNS

    @property
    def groups_per_slice(self) -> int:
        """Groups side by side in a slice."""
        return -(-self.K // (self.k_slices * self.group_columns))

    @property
    def bands(self) -> int:
        """Bands of warps_per_block strips; the last may end in strips past N."""
        return -(-self.strips // self.warps_per_block)

    @property
    def slice_groups(self) -> int:
        """Groups of one warp in a slice: the list runs along the first band, then the second, and so on."""
        return self.bands * self.groups_per_slice

    @property
    def streams_per_slice(self) -> int:
        """Streams of a slice: blocks share the lists in order and evenly, each warp has its own list."""
        return self.blocks_per_slice * self.warps_per_block

    @property
    def streams(self) -> int:
        """Streams of the matrix; slice s owns those from ``s * streams_per_slice`` on."""
        return self.k_slices * self.streams_per_slice

    def first_group(self, block_in_slice: int) -> int:
        """Where in the slice's lists a block begins."""
        return block_in_slice * self.slice_groups // self.blocks_per_slice

    @property
    def max_groups_per_stream(self) -> int:
        """Groups of the longest stream."""
        return -(-self.slice_groups // self.blocks_per_slice)

    @property
    def max_parts_per_slice(self) -> int:
        """No band is shared by more blocks of one slice."""
        least = self.slice_groups // self.blocks_per_slice
        return min(-(-self.groups_per_slice // least) + 1, self.blocks_per_slice)

    @property
    def mask_words(self) -> int:
        """Mask words of a lane in one group."""
        return 2 * self.group_tiles

    @property
    def head_bytes(self) -> int:
        """Bytes of a transfer before its value rows."""
        return HEADER_BYTES + self.mask_words * ROW_BYTES

    @property
    def ring_bytes(self) -> int:
        """Shared memory of one warp: its ring, the guard, and the heads of the transfers in flight."""
        return (self.ring_rows + GUARD_ROWS) * ROW_BYTES + (self.lookahead + 1) * self.head_bytes

    def shared_bytes(self, M: int) -> int:
        """Shared memory of one block of the linear kernel for M tokens."""
        barriers = self.warps_per_block * (self.lookahead + 1) * 8
        before_x = -(-(self.warps_per_block * self.ring_bytes + barriers) // 128) * 128
        return before_x + self.groups_per_slice * self.group_columns * 16 * (1 if M <= 8 else 2)

    def workspace_bytes(self, tokens: int = MAX_TOKENS) -> int:
        """Bytes of the linear kernels' workspace for that many tokens a launch. Layers may share it."""
        fragments = 2 * -(-tokens // 8)
        return COUNTER_BYTES + self.strips * self.k_slices * self.max_parts_per_slice * fragments * 512

    def band_parts(self, band: int) -> tuple[int, int]:
        """The first block of a slice that holds groups of the band, and how many do."""
        first = self.owner(band * self.groups_per_slice)
        return first, self.owner((band + 1) * self.groups_per_slice - 1) - first + 1

    def owner(self, group: int) -> int:
        """The block of a slice that holds a group of its lists."""
        # The last block i with i * slice_groups // blocks_per_slice <= group.
        return ((group + 1) * self.blocks_per_slice - 1) // self.slice_groups


@dataclass(frozen=True, slots=True)
class PackedLaneStreams:
    """A packed matrix: `data` uint8, `descriptors` int32 ``[streams, 12]``, and the final plan."""

    plan: LaneStreamPlan
    data: Bytes
    descriptors: npt.NDArray[np.int32]


# --- geometry -----------------------------------------------------------------------------------------------


def _element_positions() -> tuple[Ints, Ints]:
    """Row (of 16) and column (of 64) of mask bit b of lane l: two arrays ``[32 lanes, 32 bits]``."""
    lane, bit = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    register, step, odd = bit // 8, bit % 8 // 2, bit % 2
    row = lane // 4 + register % 2 * 8
    column = step // 2 * 32 + lane % 4 * 8 + step % 2 * 4 + register // 2 * 2 + odd
    return row, column


_ROW, _COLUMN = _element_positions()


def _decode_order(group_tiles: int) -> list[tuple[int, int]]:
    """(mask word, bit) of every element of a group in the order in which a lane decodes them."""
    return [
        (tile * 2 + half, register * 8 + step * 2 + odd)
        for tile in range(group_tiles)
        for half_tile in (0, 1)
        for half in (0, 1)
        for step in (half_tile * 2, half_tile * 2 + 1)
        for register in range(4)
        for odd in (0, 1)
    ]


def _group_elements(padded: Bits, plan: LaneStreamPlan, slice_index: int, group: tuple[int, int]) -> Bits:
    """Elements of a group by ``[mask word, lane, bit]``."""
    strip, group_in_strip = group
    column = (slice_index * plan.groups_per_slice + group_in_strip) * plan.group_columns
    out = np.empty((plan.mask_words, 32, 32), np.uint16)
    for word in range(plan.mask_words):
        rows = strip * STRIP_ROWS + word % 2 * 16 + _ROW
        out[word] = padded[rows, column + word // 2 * TILE_COLUMNS + _COLUMN]
    return out


def _pad(dense: Bits, plan: LaneStreamPlan) -> Bits:
    columns = plan.k_slices * plan.groups_per_slice * plan.group_columns
    padded = np.zeros((plan.bands * plan.warps_per_block * STRIP_ROWS, columns), np.uint16)
    padded[: plan.N, : plan.K] = dense
    return padded


# --- packing ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    elements: Bits  # [mask word, lane, bit]
    slot: Ints  # [even/odd, lane]
    source: Ints  # [even/odd, lane]
    start: Ints  # [even/odd, lane]
    even_stream: int  # the stream (half of a ring word) that takes the even elements
    exchange: bool  # that is another one than in the group before
    least: int  # rows that every slot had filled before the group
    rows_after: int  # rows that the fullest slot has filled after it


def _walk(
    padded: Bits, plan: LaneStreamPlan, slice_index: int, groups: list[tuple[int, int]]
) -> list[_Group]:
    """Assign slots group by group: the lane with most values takes the least-filled slot."""
    level = np.zeros((2, 32), np.int64)  # [stream, slot]
    owner = np.tile(np.arange(32), (2, 1))
    rows = even_stream = 0
    walked = []
    for group in groups:
        elements = _group_elements(padded, plan, slice_index, group)
        least = int(level.min())
        slot, source, start = (np.empty((2, 32), np.int64) for _ in range(3))
        counts = [(elements[:, :, odd::2] != 0).sum(axis=(0, 2)) for odd in (0, 1)]
        # The parity with more values goes to the stream with fewer.
        before = even_stream
        even_stream = int((counts[0].sum() > counts[1].sum()) == (level[0].sum() > level[1].sum()))
        for odd in (0, 1):
            stream = odd ^ even_stream
            # Stable sorts: equal lanes and equal slots go by number.
            lanes = np.argsort(-counts[odd], kind="stable")
            slots = np.argsort(level[stream], kind="stable")
            slot[odd, lanes] = slots
            source[odd] = owner[stream, slot[odd]]
            start[odd] = level[stream, slot[odd]]
            owner[stream, slot[odd]] = np.arange(32)
            level[stream, slot[odd]] = start[odd] + counts[odd]
        rows = max(rows, int(level.max()))
        exchange = even_stream != before
        walked.append(_Group(elements, slot, source, start, even_stream, exchange, least, rows))
    return walked


def _ring_rows_needed(walked: list[_Group], lookahead: int) -> int:
    last = len(walked) - 1
    return max(walked[min(g + lookahead, last)].rows_after - walked[g].least for g in range(len(walked)))


def _transfer_rows(walked: list[_Group], g: int) -> tuple[int, int]:
    """First row and number of rows of transfer g."""
    first = walked[g - 1].rows_after if g else 0
    return first, walked[g].rows_after - first


def _emit(walked: list[_Group], plan: LaneStreamPlan, lines: list[int]) -> list[bytes]:
    """The bytes of a stream's transfers; `lines` says where in the data each will begin."""
    values = np.zeros((walked[-1].rows_after, 32, 2), np.uint16)
    order = _decode_order(plan.group_tiles)
    for group in walked:
        following = group.start.copy()
        for word, bit in order:
            for lane in range(32):
                if group.elements[word, lane, bit]:
                    odd = bit % 2
                    stream = odd ^ group.even_stream
                    values[following[odd, lane], group.slot[odd, lane], stream] = group.elements[
                        word, lane, bit
                    ]
                    following[odd, lane] += 1
    transfers = []
    for g, group in enumerate(walked):
        first, rows = _transfer_rows(walked, g)
        record = [_mirror(plan, first, rows) | (EXCHANGE if group.exchange else 0), 0, 0, 0]
        if g + plan.lookahead < len(walked):
            record[1:] = _refill(plan, *_transfer_rows(walked, g + plan.lookahead), lines[g + plan.lookahead])
        bits = (group.elements != 0).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        masks = bits.sum(axis=2).astype("<u4")  # [word, lane]
        out = bytearray((group.source[0] | group.source[1] << 5).astype("<u2").tobytes())
        out += np.array(record, "<u4").tobytes()
        out += bytes(HEADER_BYTES - REFILL_OFFSET - REFILL_BYTES)
        for quad in range(0, plan.mask_words, 4):
            out += masks[quad : quad + 4].T.tobytes()
        out += values[first : first + rows].astype("<u2").tobytes()
        transfers.append(bytes(out))
    return transfers


def _refill(plan: LaneStreamPlan, first: int, rows: int, line: int) -> list[int]:
    """The record's last three numbers for a later transfer of these rows that begins at this line."""
    begin = first % plan.ring_rows
    to_end = min(rows, plan.ring_rows - begin)
    return [to_end | (rows - to_end) << 16, begin * ROW_BYTES, line]


def _mirror(plan: LaneStreamPlan, first: int, rows: int) -> int:
    begin = first % plan.ring_rows
    return MIRROR if rows and (begin < GUARD_ROWS or begin + rows > plan.ring_rows) else 0


def pack(dense: Bits, plan: LaneStreamPlan) -> PackedLaneStreams:
    """Pack ``dense`` [N, K] (the bits of its elements) as the specification says.

    An element is stored unless all its bits are zero. The result's plan has the ring rows that were needed.
    """
    if dense.shape != (plan.N, plan.K):
        raise ValueError(f"lane_stream.pack: dense has shape {dense.shape}, the plan [{plan.N}, {plan.K}]")
    padded = _pad(dense, plan)
    walks = [
        _walk(
            padded,
            plan,
            stream // plan.streams_per_slice,
            _stream_groups(plan, stream % plan.streams_per_slice),
        )
        for stream in range(plan.streams)
    ]
    needed = max(_ring_rows_needed(walk, plan.lookahead) for walk in walks)
    plan = replace(plan, ring_rows=max(MIN_RING_ROWS, needed))
    lines = [[0] * len(walk) for walk in walks]
    line = 0
    for g in range(plan.max_groups_per_stream):
        for stream, walk in enumerate(walks):
            if g < len(walk):
                lines[stream][g] = line
                line += plan.head_bytes // ROW_BYTES + _transfer_rows(walk, g)[1]
    transfers = [_emit(walk, plan, at) for walk, at in zip(walks, lines, strict=True)]
    data = bytearray(line * ROW_BYTES)
    descriptors = np.zeros((plan.streams, DESCRIPTOR_WORDS), np.int32)
    for stream, walk in enumerate(walks):
        for at, payload in zip(lines[stream], transfers[stream], strict=True):
            data[at * ROW_BYTES : at * ROW_BYTES + len(payload)] = payload
        leading = range(min(plan.lookahead, len(walk)))
        descriptors[stream] = _descriptor(
            plan,
            stream % plan.streams_per_slice,
            [_transfer_rows(walk, g)[1] for g in leading],
            [lines[stream][g] for g in leading],
        )
    return PackedLaneStreams(plan, np.frombuffer(bytes(data), np.uint8).copy(), descriptors)


def _stream_list(plan: LaneStreamPlan, stream_in_slice: int) -> range:
    """Which entries of its warp's list a stream holds."""
    block = stream_in_slice // plan.warps_per_block
    return range(plan.first_group(block), plan.first_group(block + 1))


def _stream_groups(plan: LaneStreamPlan, stream_in_slice: int) -> list[tuple[int, int]]:
    """Strip, and group of the slice in it, of every group of a stream."""
    warp = stream_in_slice % plan.warps_per_block
    return [
        (i // plan.groups_per_slice * plan.warps_per_block + warp, i % plan.groups_per_slice)
        for i in _stream_list(plan, stream_in_slice)
    ]


def _descriptor(
    plan: LaneStreamPlan, stream_in_slice: int, lead_rows: list[int], lead_lines: list[int]
) -> npt.NDArray[np.int32]:
    groups = _stream_list(plan, stream_in_slice)
    first_holder, first_parts = plan.band_parts(groups[0] // plan.groups_per_slice)
    first_part = stream_in_slice // plan.warps_per_block - first_holder
    last_parts = plan.band_parts(groups[-1] // plan.groups_per_slice)[1]
    unused = [0] * (MAX_LOOKAHEAD - len(lead_rows))
    raw = (
        np.array([groups.start, len(groups)], "<u4").tobytes()
        + np.array([first_part, first_parts, last_parts, 0], "<u2").tobytes()
        + np.array(lead_rows + unused, "<u2").tobytes()
        + np.array(lead_lines + unused, "<u4").tobytes()
        + bytes(8)
    )
    return np.frombuffer(raw, "<i4").astype(np.int32)


# --- reading ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Transfer:
    line: int
    source: Ints  # [even/odd, lane]
    record: Ints  # the refill record's four numbers
    present: npt.NDArray[np.bool_]  # [mask word, lane, bit]
    rows: Bits  # [value rows, slot, stream]


def _lead(packed: PackedLaneStreams, stream: int) -> tuple[list[int], list[int]]:
    """Rows and lines of a stream's leading transfers, as its descriptor has them."""
    raw = packed.descriptors[stream].astype("<i4").tobytes()
    return np.frombuffer(raw[16:24], "<u2").tolist(), np.frombuffer(raw[24:40], "<u4").tolist()


def _transfers(packed: PackedLaneStreams, stream: int) -> list[_Transfer]:
    """Follow a stream through the data. Raises ValueError where it runs past it."""
    plan, data = packed.plan, packed.data
    lead_rows, lead_lines = _lead(packed, stream)
    rows_of, line_of = lead_rows[: plan.lookahead], lead_lines[: plan.lookahead]
    refill_end = REFILL_OFFSET + REFILL_BYTES
    out: list[_Transfer] = []
    for g in range(len(_stream_groups(plan, stream % plan.streams_per_slice))):
        begin = line_of[g] * ROW_BYTES
        end = begin + plan.head_bytes + rows_of[g] * ROW_BYTES
        if end > data.size:
            raise ValueError(f"stream {stream}, group {g}: ends at byte {end}, but there are {data.size}")
        head = data[begin : begin + plan.head_bytes].tobytes()
        if any(head[refill_end:HEADER_BYTES]):
            raise ValueError(f"stream {stream}, group {g}: the header's reserved bytes are not zero")
        sources = np.frombuffer(head[:REFILL_OFFSET], "<u2").astype(np.int64)
        record = np.frombuffer(head[REFILL_OFFSET:refill_end], "<u4").astype(np.int64)
        quads = np.frombuffer(head[HEADER_BYTES:], "<u4").reshape(-1, 32, 4)
        masks = quads.transpose(0, 2, 1).reshape(plan.mask_words, 32, 1)
        values = np.frombuffer(data[begin + plan.head_bytes : end].tobytes(), "<u2")
        out.append(
            _Transfer(
                line=line_of[g],
                source=np.stack([sources & 31, sources >> 5]),
                record=record,
                present=(masks >> np.arange(32, dtype=np.uint32) & 1).astype(bool),
                rows=values.reshape(rows_of[g], 32, 2),
            )
        )
        rows_of.append(int((record[1] & 0xFFFF) + (record[1] >> 16)))
        line_of.append(int(record[3]))
    return out


def unpack(packed: PackedLaneStreams) -> Bits:
    """The dense ``[N, K]`` matrix, bit for bit what was packed."""
    plan = packed.plan
    columns = plan.k_slices * plan.groups_per_slice * plan.group_columns
    padded = np.zeros((plan.bands * plan.warps_per_block * STRIP_ROWS, columns), np.uint16)
    order = _decode_order(plan.group_tiles)
    for stream in range(plan.streams):
        slice_index = stream // plan.streams_per_slice
        groups = _stream_groups(plan, stream % plan.streams_per_slice)
        transfers = _transfers(packed, stream)
        rows = np.concatenate([t.rows for t in transfers])
        slot = np.tile(np.arange(32), (2, 1))
        row = np.zeros((2, 32), np.int64)
        even_stream = 0
        for group, transfer in zip(groups, transfers, strict=True):
            if transfer.record[0] & EXCHANGE:
                even_stream, slot, row = 1 - even_stream, slot[::-1].copy(), row[::-1].copy()
            for odd in (0, 1):
                slot[odd] = slot[odd, transfer.source[odd]]
                row[odd] = row[odd, transfer.source[odd]]
            top = group[0] * STRIP_ROWS
            left = (slice_index * plan.groups_per_slice + group[1]) * plan.group_columns
            for word, bit in order:
                for lane in np.flatnonzero(transfer.present[word, :, bit]):
                    odd = bit % 2
                    padded[
                        top + word % 2 * 16 + _ROW[lane, bit],
                        left + word // 2 * TILE_COLUMNS + _COLUMN[lane, bit],
                    ] = rows[row[odd, lane], slot[odd, lane], odd ^ even_stream]
                    row[odd, lane] += 1
    return padded[: plan.N, : plan.K]


def validate(packed: PackedLaneStreams) -> None:
    """Check everything that the kernels trust.

    Raises:
        ValueError: a descriptor disagrees with the plan, a transfer runs past the data, a slot is given to
            two lanes, a lane takes a value that has not arrived or whose row was refilled, a refill record
            disagrees with the rows that follow, or elements past N or K are present. The message names
            stream and group.
    """
    plan, descriptors = packed.plan, packed.descriptors
    if packed.data.dtype != np.uint8 or packed.data.ndim != 1:
        raise ValueError(f"data must be 1-D uint8, got {packed.data.dtype} {packed.data.shape}")
    shape = (plan.streams, DESCRIPTOR_WORDS)
    if descriptors.dtype != np.int32 or descriptors.shape != shape:
        raise ValueError(
            f"descriptors must be int32 {list(shape)}, got {descriptors.dtype} {list(descriptors.shape)}"
        )
    streams = [_validate_stream(packed, stream) for stream in range(plan.streams)]
    line = 0
    for g in range(plan.max_groups_per_stream):
        for stream, transfers in enumerate(streams):
            if g < len(transfers):
                if transfers[g].line != line:
                    raise ValueError(
                        f"stream {stream}, group {g}: begins at line {transfers[g].line}, expected {line}"
                    )
                line += plan.head_bytes // ROW_BYTES + len(transfers[g].rows)
    if line * ROW_BYTES != packed.data.size:
        raise ValueError(f"the transfers end at byte {line * ROW_BYTES}, but there are {packed.data.size}")


def _validate_stream(packed: PackedLaneStreams, stream: int) -> list[_Transfer]:
    plan = packed.plan
    groups = _stream_groups(plan, stream % plan.streams_per_slice)
    leading = min(plan.lookahead, len(groups))
    lead_rows, lead_lines = _lead(packed, stream)
    want = _descriptor(plan, stream % plan.streams_per_slice, lead_rows[:leading], lead_lines[:leading])
    if not np.array_equal(want, packed.descriptors[stream]):
        raise ValueError(
            f"stream {stream}: descriptor {packed.descriptors[stream].tolist()} disagrees with the plan, "
            f"which wants {want.tolist()}"
        )
    transfers = _transfers(packed, stream)
    rows_after = np.cumsum([len(t.rows) for t in transfers]).tolist()
    slot = np.tile(np.arange(32), (2, 1))
    row = np.zeros((2, 32), np.int64)
    for g, (group, transfer) in enumerate(zip(groups, transfers, strict=True)):
        where = f"stream {stream}, group {g}"
        if transfer.record[0] & EXCHANGE:
            slot, row = slot[::-1].copy(), row[::-1].copy()
        for odd in (0, 1):
            source = transfer.source[odd]
            if not np.array_equal(np.sort(source), np.arange(32)):
                raise ValueError(f"{where}: slot sources {source.tolist()} are no permutation of the lanes")
            slot[odd], row[odd] = slot[odd, source], row[odd, source]
        _validate_record(plan, where, transfers, rows_after, g)
        span = rows_after[min(g + plan.lookahead, len(transfers) - 1)] - int(row.min())
        if span > plan.ring_rows:
            raise ValueError(f"{where}: {span} rows are needed at once, but the ring has {plan.ring_rows}")
        for odd in (0, 1):
            row[odd] += transfer.present[:, :, odd::2].sum(axis=(0, 2))
        if int(row.max()) > rows_after[g]:
            raise ValueError(
                f"{where}: a lane's values reach row {int(row.max())}, but only {rows_after[g]} have arrived"
            )
        _validate_inside(plan, where, stream // plan.streams_per_slice, group, transfer)
    return transfers


def _validate_record(
    plan: LaneStreamPlan, where: str, transfers: list[_Transfer], rows_after: list[int], g: int
) -> None:
    first = rows_after[g - 1] if g else 0
    exchange = int(transfers[g].record[0]) & EXCHANGE  # either is right
    want = [_mirror(plan, first, rows_after[g] - first) | exchange, 0, 0, 0]
    later = g + plan.lookahead
    if later < len(transfers):
        want[1:] = _refill(plan, rows_after[later - 1], len(transfers[later].rows), transfers[later].line)
    if transfers[g].record.tolist() != want:
        raise ValueError(f"{where}: refill record {transfers[g].record.tolist()}, expected {want}")


def _validate_inside(
    plan: LaneStreamPlan, where: str, slice_index: int, group: tuple[int, int], transfer: _Transfer
) -> None:
    top = group[0] * STRIP_ROWS
    left = (slice_index * plan.groups_per_slice + group[1]) * plan.group_columns
    if top + STRIP_ROWS <= plan.N and left + plan.group_columns <= plan.K:
        return
    for word in range(plan.mask_words):
        outside = (top + word % 2 * 16 + _ROW >= plan.N) | (
            left + word // 2 * TILE_COLUMNS + _COLUMN >= plan.K
        )
        if (transfer.present[word] & outside).any():
            raise ValueError(f"{where}: elements past N={plan.N} or K={plan.K} are present")
