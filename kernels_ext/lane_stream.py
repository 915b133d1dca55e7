"""Lane-stream weights on the GPU: packing, the linear op for up to 256 tokens, unpacking.

The format is specified in formats/LANE_STREAM.md; formats/lane_stream.py is its slow reference. All functions
need CUDA kernels in the build and a GPU of compute capability 9.0 or newer (packing alone: any).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from .build_info import build_info
from .formats import lane_stream as reference
from .formats.lane_stream import (
    MAX_BATCH_TOKENS,
    MAX_RING_ROWS,
    MAX_TOKENS,
    MIN_RING_ROWS,
    ROW_BYTES,
    LaneStreamPlan,
)
from .ops import BitmapWeight, bitmap_unpack

DTYPES: Final = (torch.float16, torch.bfloat16)
# Of one call of the linear op; more than one launch takes go in several.
MAX_CALL_TOKENS: Final = 256

_PLANS_TRIED: Final = 8

_ops = torch.ops.kernels_ext


class LaneStreamUnavailable(RuntimeError):
    """This build or this GPU has no lane-stream kernels; the message says which and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneStreamWeight:
    """An ``[N, K]`` matrix in the lane-stream format, on one CUDA device.

    Attributes:
        plan: how the matrix was cut into streams.
        dtype: float16 or bfloat16, of the elements and so of x and y.
        data: uint8, all transfers.
        descriptors: int32 ``[streams, 12]``, one 48-byte descriptor a stream.
        nnz: stored elements.

    Raises:
        ValueError: a shape, dtype or device does not hold. `validate` checks the contents.
    """

    plan: LaneStreamPlan
    dtype: torch.dtype
    data: Tensor
    descriptors: Tensor
    nnz: int

    def __post_init__(self) -> None:
        where = f"LaneStreamWeight N={self.N} K={self.K}"
        if self.dtype not in DTYPES:
            raise ValueError(f"{where}: dtype must be float16 or bfloat16, got {self.dtype}")
        if self.data.dtype != torch.uint8 or self.data.dim() != 1 or not self.data.is_contiguous():
            raise ValueError(
                f"{where}: data must be 1-D contiguous uint8, got {self.data.dtype} {tuple(self.data.shape)}"
            )
        want = (self.plan.streams, reference.DESCRIPTOR_WORDS)
        if self.descriptors.dtype != torch.int32 or self.descriptors.shape != want:
            raise ValueError(
                f"{where}: descriptors must be int32 {want}, "
                f"got {self.descriptors.dtype} {tuple(self.descriptors.shape)}"
            )
        if self.data.device != self.descriptors.device:
            raise ValueError(
                f"{where}: data is on {self.data.device}, but descriptors are on {self.descriptors.device}"
            )

    @property
    def N(self) -> int:
        """Rows, the layer's out features."""
        return self.plan.N

    @property
    def K(self) -> int:
        """Columns, the layer's in features."""
        return self.plan.K

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.data.device

    @property
    def sparsity(self) -> float:
        """Share of elements that are not stored, 0 to 1."""
        return 1 - self.nnz / (self.N * self.K)

    @property
    def stored_bytes(self) -> int:
        """Bytes of both tensors together."""
        return self.data.numel() + self.descriptors.numel() * 4

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same matrix stored densely."""
        return self.N * self.K * 2

    def validate(self) -> LaneStreamWeight:
        """Check everything that the kernels trust, on the CPU (seconds for a large matrix); returns self.

        Raises:
            ValueError: see `formats.lane_stream.validate`.
        """
        reference.validate(
            reference.PackedLaneStreams(
                self.plan, self.data.cpu().numpy(), self.descriptors.cpu().contiguous().numpy()
            )
        )
        return self


def estimated_bytes(N: int, K: int, nnz: int) -> int:
    """Bytes that a ``[N, K]`` matrix with evenly spread non-zeros is expected to take, before it is packed.

    2 bytes a value, a bit an element, and 5% for padding and descriptors: at sparsity 0.5 the six shapes of
    benchmarks/results/2026-11-30-linear-h200.json take 3.5 to 6.1% more than the first two.
    """
    return int((2 * nnz + N * K / 8) * 1.05)


# --- the plan -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShape:
    """What the choice of a plan needs to know of a GPU."""

    multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int

    def shared_limit(self, plan: LaneStreamPlan) -> int:
        """Most shared memory that a block may take: one or two on a multiprocessor are to run at once."""
        blocks = -(-plan.k_slices * plan.blocks_per_slice // self.multiprocessors)
        if blocks > 2:
            return self.shared_bytes_per_block  # they run one after another
        # A block takes 1 KiB for itself.
        return min(self.shared_bytes_per_block, self.shared_bytes_per_multiprocessor // blocks - 1024)

    @staticmethod
    def of(device: torch.device) -> DeviceShape:
        """Read it off a device."""
        # torch's stubs do not know shared_memory_per_block_optin.
        properties: Any = torch.cuda.get_device_properties(device)
        return DeviceShape(
            multiprocessors=properties.multi_processor_count,
            shared_bytes_per_block=properties.shared_memory_per_block_optin,
            shared_bytes_per_multiprocessor=properties.shared_memory_per_multiprocessor,
        )


def expected_ring_rows(plan: LaneStreamPlan, sparsity: float) -> int:
    """Ring rows that evenly spread non-zeros need: the groups in flight and how far slots lie apart."""
    elements = plan.group_tiles * 32  # of one lane and one stream in a group
    groups = min(plan.lookahead + 1, plan.max_groups_per_stream)
    deviation = (elements * sparsity * (1 - sparsity)) ** 0.5
    # 6 deviations: the least that the benchmark's large matrices needed. Packing finds out what it takes.
    rows = groups * elements * (1 - sparsity) + 6 * deviation
    return min(MAX_RING_ROWS, max(MIN_RING_ROWS, int(rows) + 2))


def candidate_plans(N: int, K: int, sparsity: float, device: DeviceShape) -> list[LaneStreamPlan]:
    """Every plan worth considering.

    A plan fills the device once: one block for every multiprocessor.
    """
    out = []
    for group_tiles in (2, 4):
        columns = -(-K // (group_tiles * reference.TILE_COLUMNS))
        for lookahead in (1, 2, 3):
            for blocks in (device.multiprocessors,):
                for k_slices in range(1, min(columns, 32) + 1):
                    # Uneven slices waste the last one's columns.
                    if -(-columns // k_slices) * k_slices > columns * 1.05:
                        continue
                    # In fours: a multiprocessor has four schedulers, and the busiest sets the pace.
                    for warps in (1, 2, 4, 8, 12, 16):
                        strips = -(-N // reference.STRIP_ROWS)
                        bands = -(-strips // warps)
                        # Nor may a band's strips past the matrix cost much.
                        if warps > 1 and bands * warps > strips * 1.05:
                            continue
                        plan = LaneStreamPlan(
                            N=N,
                            K=K,
                            group_tiles=group_tiles,
                            k_slices=k_slices,
                            blocks_per_slice=max(1, min(blocks // k_slices, bands * -(-columns // k_slices))),
                            warps_per_block=warps,
                            lookahead=lookahead,
                        )
                        plan = replace(plan, ring_rows=expected_ring_rows(plan, sparsity))
                        if plan.shared_bytes(MAX_TOKENS) <= device.shared_limit(plan):
                            out.append(plan)
    return out


def ranked_plans(N: int, K: int, sparsity: float, device: DeviceShape) -> list[LaneStreamPlan]:
    """Every candidate, the one that a small model of the kernel expects to be fastest first.

    Raises:
        ValueError: the device has too little shared memory for any plan.
    """
    candidates = candidate_plans(N, K, sparsity, device)
    if not candidates:
        raise ValueError(
            f"lane_stream: no plan for N={N} K={K} sparsity={sparsity:.3f} fits "
            f"{device.shared_bytes_per_block} bytes of shared memory a block"
        )
    return sorted(candidates, key=lambda plan: expected_clocks(plan, sparsity, device))


# Of the model below, in clocks of one multiprocessor at 1.755 GHz. Least squares over 809 measured plans (six
# shapes, sparsity 0.5 and 0.7, 8 and 16 tokens, H200): 11% r.m.s.; the plan it picks takes 0 to 5% longer
# than the best one at sparsity 0.5, 0 to 15% at 0.7.
_FILL_BYTES: Final = 21.0  # from memory, per clock
_DECODE_ELEMENTS: Final = 29.0  # per clock with endless warps
_DECODE_HALF_WARPS: Final = 3.5  # as many warps decode at half that rate
_SECOND_TOKEN_TILE: Final = 0.12  # share of decoding that 9 to 16 tokens add
_GROUP_CLOCKS: Final = 8.4
_STRIP_CLOCKS: Final = 1204.0  # to hand over a strip's sums
_PART_CLOCKS: Final = 110.0  # for each part of a strip and token tile
_LAUNCH_CLOCKS: Final = 6758.0


def expected_clocks(plan: LaneStreamPlan, sparsity: float, device: DeviceShape) -> float:
    """What a small model expects of a plan: clocks of a launch for 8 tokens and half of one for 16."""
    return _launch_clocks(plan, sparsity, device, 1) + 0.5 * _launch_clocks(plan, sparsity, device, 2)


def _launch_clocks(plan: LaneStreamPlan, sparsity: float, device: DeviceShape, token_tiles: int) -> float:
    # The busiest multiprocessor and the longest stream set the pace.
    blocks_per_multiprocessor = -(-plan.k_slices * plan.blocks_per_slice // device.multiprocessors)
    warps = blocks_per_multiprocessor * plan.warps_per_block
    groups = plan.max_groups_per_stream
    elements = reference.STRIP_ROWS * plan.group_columns
    fill = groups * warps * (plan.head_bytes + elements * 2.04 * (1 - sparsity)) / _FILL_BYTES
    rate = _DECODE_ELEMENTS * warps / (warps + _DECODE_HALF_WARPS)
    decode_group = elements * (1 + _SECOND_TOKEN_TILE * (token_tiles - 1)) / rate + _GROUP_CLOCKS
    decode = groups * warps * decode_group
    aligned = plan.slice_groups % plan.blocks_per_slice == 0 and (
        groups % plan.groups_per_slice == 0 or plan.groups_per_slice % groups == 0
    )
    strips = -(-groups // plan.groups_per_slice) + (0 if aligned else 1)
    parts = plan.k_slices * max(1.0, plan.groups_per_slice / groups)
    hand_over = strips * (_STRIP_CLOCKS + _PART_CLOCKS * parts * token_tiles)
    # Filling and decoding overlap, the worse the closer they are.
    return float((fill**3 + decode**3) ** (1 / 3) + hand_over + _LAUNCH_CLOCKS)


# --- ops ----------------------------------------------------------------------------------------------------


def _need_cuda_kernels() -> None:
    info = build_info()
    if not info.cuda_loaded:
        raise LaneStreamUnavailable(
            f"format lane_stream needs CUDA kernels, but this build has none ({info.cuda_reason}). "
            "Reinstall with -C cmake.define.KERNELS_CUDA=ON under a CUDA build of torch."
        )


def lane_stream_pack(weight: Tensor | BitmapWeight, plan: LaneStreamPlan | None = None) -> LaneStreamWeight:
    """Pack a matrix on its GPU. An element is stored unless all its bits are zero.

    Args:
        weight: ``[N, K]`` float16 or bfloat16 on a CUDA device, N, K >= 1; or a bitmap weight there.
        plan: how to cut the matrix; None takes the best of `ranked_plans` that fits. Its ring_rows, and where
            they do not fit its lookahead and warps, are what the matrix needed.

    Raises:
        ValueError: a shape, dtype or device above does not hold, or the plan's block does not fit the device.
        LaneStreamUnavailable: the build has no CUDA kernels.
    """
    _need_cuda_kernels()
    dense = bitmap_unpack(weight) if isinstance(weight, BitmapWeight) else weight.contiguous()
    if dense.dim() != 2 or 0 in dense.shape:
        raise ValueError(
            f"lane_stream_pack: weight must be [N, K] with N, K >= 1, got shape {tuple(dense.shape)}"
        )
    if dense.dtype not in DTYPES:
        raise ValueError(f"lane_stream_pack: weight must be float16 or bfloat16, got {dense.dtype}")
    if dense.device.type != "cuda":
        raise ValueError(f"lane_stream_pack: weight must be on a CUDA device, got {dense.device}")
    N, K = dense.shape
    bits = dense.view(torch.int16)
    nnz = int(torch.count_nonzero(bits))
    device = DeviceShape.of(dense.device)
    if plan is None:
        plans = ranked_plans(N, K, 1 - nnz / (N * K), device)
    elif (plan.N, plan.K) == (N, K):
        plans = [plan]
    else:
        raise ValueError(f"lane_stream_pack: the plan is for [{plan.N}, {plan.K}], the weight is [{N}, {K}]")
    plan, group_rows = _fit_ring(bits, plans, device)
    descriptors, lines, data_bytes = _place_streams(plan, group_rows)
    data = _ops.lane_stream_encode(bits, group_rows, lines, data_bytes, plan.numbers)
    return LaneStreamWeight(plan=plan, dtype=dense.dtype, data=data, descriptors=descriptors, nnz=nnz)


def _fit_ring(
    bits: Tensor, plans: list[LaneStreamPlan], device: DeviceShape
) -> tuple[LaneStreamPlan, Tensor]:
    """The first plan whose ring fits once the matrix was measured, and the rows of its transfers.

    Where non-zeros crowd together the ring grows past what was expected. A few plans are tried as they are;
    then the first one gives way: transfers in flight, then warps.
    """
    for plan in plans[:_PLANS_TRIED]:
        measured = _measure(bits, plan)
        fitted = _with_ring(plan, *measured)
        if fitted and fitted.shared_bytes(MAX_TOKENS) <= device.shared_limit(fitted):
            return fitted, measured[0]
    plan = plans[0]
    while True:
        measured = _measure(bits, plan)
        for lookahead in range(plan.lookahead, 0, -1):
            fitted = _with_ring(replace(plan, lookahead=lookahead), *measured)
            if fitted and fitted.shared_bytes(MAX_TOKENS) <= device.shared_limit(fitted):
                return fitted, measured[0]
        if plan.warps_per_block == 1:
            raise ValueError(
                f"lane_stream_pack: N={plan.N} K={plan.K}: the ring of one warp does not fit "
                f"{device.shared_limit(plan)} bytes of shared memory; choose a plan with more k_slices"
            )
        # In fours where possible: a multiprocessor has four schedulers.
        fewer = plan.warps_per_block - 1
        plan = replace(plan, warps_per_block=fewer // 4 * 4 or fewer)


def _measure(bits: Tensor, plan: LaneStreamPlan) -> tuple[Tensor, Tensor]:
    group_rows, least_rows = _ops.lane_stream_measure(bits, plan.numbers)
    return group_rows, least_rows


def _with_ring(plan: LaneStreamPlan, group_rows: Tensor, least_rows: Tensor) -> LaneStreamPlan | None:
    """The plan with the ring rows that its lookahead needs; None where there are too many."""
    groups = torch.arange(group_rows.shape[1], device=group_rows.device)
    ahead = (groups + plan.lookahead).clamp(max=group_rows.shape[1] - 1)
    ring_rows = max(MIN_RING_ROWS, int((group_rows[:, ahead] - least_rows).max()))
    return replace(plan, ring_rows=ring_rows) if ring_rows <= MAX_RING_ROWS else None


def _place_streams(plan: LaneStreamPlan, group_rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Descriptors, the line where every transfer begins, and the bytes of all.

    Transfers lie in the order in which the device reads them: the first of every stream, then the second, and
    so on. All warps move through memory together.
    """
    device = group_rows.device
    block = torch.arange(plan.streams, device=device) % plan.streams_per_slice // plan.warps_per_block
    first = block * plan.slice_groups // plan.blocks_per_slice
    count = (block + 1) * plan.slice_groups // plan.blocks_per_slice - first
    rows = group_rows.diff(dim=1, prepend=torch.zeros_like(group_rows[:, :1]))
    exists = torch.arange(group_rows.shape[1], device=device) < count[:, None]
    transfer_lines = ((rows + plan.head_bytes // ROW_BYTES) * exists).T.long()
    ends = transfer_lines.flatten().cumsum(0)
    lines = (ends.view_as(transfer_lines) - transfer_lines).T.to(torch.int32).contiguous()

    def owner(group: Tensor) -> Tensor:
        return ((group + 1) * plan.blocks_per_slice - 1) // plan.slice_groups

    first_band, last_band = first // plan.groups_per_slice, (first + count - 1) // plan.groups_per_slice
    first_holder = owner(first_band * plan.groups_per_slice)
    last_holder = owner(last_band * plan.groups_per_slice)
    shorts = torch.zeros(plan.streams, 8, dtype=torch.int64, device=device)
    shorts[:, 0] = block - first_holder
    shorts[:, 1] = owner((first_band + 1) * plan.groups_per_slice - 1) - first_holder + 1
    shorts[:, 2] = owner((last_band + 1) * plan.groups_per_slice - 1) - last_holder + 1
    lead = min(plan.lookahead, group_rows.shape[1])
    shorts[:, 4 : 4 + lead] = rows[:, :lead]
    descriptors = torch.zeros(plan.streams, reference.DESCRIPTOR_WORDS, dtype=torch.int32, device=device)
    descriptors[:, 0] = first
    descriptors[:, 1] = count
    descriptors[:, 2:6] = shorts.to(torch.int16).view(torch.int32)
    descriptors[:, 6 : 6 + lead] = lines[:, :lead] * exists[:, :lead]
    return descriptors, lines, int(ends[-1]) * ROW_BYTES


def lane_stream_unpack(weight: LaneStreamWeight, out: Tensor | None = None) -> Tensor:
    """The dense ``[N, K]`` matrix, bit for bit what was packed.

    Args:
        weight: a valid weight.
        out: contiguous ``[N, K]`` in the weight's dtype to write to, e.g. a scratch buffer that layers
            share; None allocates.

    Raises:
        ValueError: `out` does not fit the weight.
        LaneStreamUnavailable: the build has no CUDA kernels.
    """
    _need_cuda_kernels()
    if out is None:
        out = torch.empty(weight.N, weight.K, dtype=weight.dtype, device=weight.device)
    elif out.shape != (weight.N, weight.K) or out.dtype != weight.dtype or not out.is_contiguous():
        raise ValueError(
            f"lane_stream_unpack: out must be a contiguous [{weight.N}, {weight.K}] {weight.dtype}, "
            f"got shape {tuple(out.shape)} {out.dtype} strides {out.stride()}"
        )
    _ops.lane_stream_unpack_into(out.view(torch.int16), weight.data, weight.descriptors, weight.plan.numbers)
    return out


def lane_stream_workspace(*weights: LaneStreamWeight, tokens: int = MAX_BATCH_TOKENS) -> Tensor:
    """A workspace large enough for each of the weights, on their device.

    Launches that may run at the same time (on two streams) need one each; others share.

    Args:
        weights: those to multiply by.
        tokens: most tokens that a launch is to take at once, at least 16. With a smaller workspace than a
            call's tokens ask for, the call decodes the weight several times.
    """
    if not weights:
        raise ValueError("lane_stream_workspace: give at least one weight")
    return torch.zeros(
        max(w.plan.workspace_bytes(max(tokens, MAX_TOKENS)) for w in weights),
        dtype=torch.uint8,
        device=weights[0].device,
    )


def lane_stream_linear(
    x: Tensor,
    weight: LaneStreamWeight,
    workspace: Tensor,
    bias: Tensor | None = None,
    *,
    overlap_launch: bool = True,
) -> Tensor:
    """Multiply activations by a lane-stream weight: ``y = x @ W.T + bias``.

    Up to 16 tokens run one kernel, more another one that takes up to 96 in a launch: as many as the plan's
    warps leave registers for, its rings shared memory, and the workspace room. Safe to capture in a CUDA
    graph. The same input gives the same bits every time.

    Args:
        x: ``[M, K]`` in the weight's dtype, contiguous, 0 <= M <= 256.
        weight: a valid weight.
        workspace: from `lane_stream_workspace`; all zero before its first use, zero again where it matters
            after every launch.
        bias: ``[N]`` in the weight's dtype, or None.
        overlap_launch: let the kernel fetch weights while the kernel before it in the stream still runs
            (programmatic dependent launch). Turn it off for a launch right after the weight was written by a
            kernel that itself lets its successor start early.

    Returns:
        ``[M, N]`` in the weight's dtype. Products are summed in float32 and rounded once.

    Raises:
        ValueError: a shape, dtype or device above does not hold.
        LaneStreamUnavailable: the build has no CUDA kernels.
    """
    if x.dim() != 2 or x.shape[1] != weight.K:
        raise ValueError(
            f"lane_stream_linear: x has shape {tuple(x.shape)}, but the weight has K={weight.K}, "
            f"so x must be [M, {weight.K}]"
        )
    if x.shape[0] > MAX_CALL_TOKENS:
        raise ValueError(
            f"lane_stream_linear: x has {x.shape[0]} rows, at most {MAX_CALL_TOKENS} are possible"
        )
    if x.dtype != weight.dtype or x.device != weight.device or not x.is_contiguous():
        raise ValueError(
            f"lane_stream_linear: x must be contiguous {weight.dtype} on {weight.device}, "
            f"got {x.dtype} on {x.device} with strides {x.stride()}"
        )
    if bias is not None and (bias.shape != (weight.N,) or bias.dtype != weight.dtype):
        raise ValueError(
            f"lane_stream_linear: bias must be [{weight.N}] {weight.dtype}, "
            f"got shape {tuple(bias.shape)} {bias.dtype}"
        )
    if workspace.numel() < weight.plan.workspace_bytes():
        raise ValueError(
            f"lane_stream_linear: workspace has {workspace.numel()} bytes, "
            f"this weight needs {weight.plan.workspace_bytes()}"
        )
    y: Tensor = _ops.lane_stream_linear(
        x, weight.data, weight.descriptors, bias, workspace, weight.plan.numbers, overlap_launch
    )
    return y


# --- fake kernels: shapes and dtypes alone, for torch.compile -----------------------------------------------


_Fake = TypeVar("_Fake", bound=Callable[..., object])


def _register_fake(op: str) -> Callable[[_Fake], _Fake]:
    """torch.library.register_fake, with the type that it lacks."""
    register: Callable[[_Fake], _Fake] = torch.library.register_fake(f"kernels_ext::{op}")
    return register


def _plan_of(numbers: list[int]) -> LaneStreamPlan:
    names = LaneStreamPlan.__slots__
    return LaneStreamPlan(**dict(zip(names, numbers, strict=True)))


@_register_fake("lane_stream_measure")
def _(dense: Tensor, plan: list[int]) -> tuple[Tensor, Tensor]:
    made = _plan_of(plan)
    shape = (made.streams, made.max_groups_per_stream)
    return dense.new_empty(shape, dtype=torch.int32), dense.new_empty(shape, dtype=torch.int32)


@_register_fake("lane_stream_encode")
def _(dense: Tensor, group_rows: Tensor, lines: Tensor, data_bytes: int, plan: list[int]) -> Tensor:
    return dense.new_empty((data_bytes,), dtype=torch.uint8)


@_register_fake("lane_stream_unpack_into")
def _(dense: Tensor, data: Tensor, descriptors: Tensor, plan: list[int]) -> None:
    return None


@_register_fake("lane_stream_linear")
def _(
    x: Tensor,
    data: Tensor,
    descriptors: Tensor,
    bias: Tensor | None,
    workspace: Tensor,
    plan: list[int],
    overlap_launch: bool = True,
) -> Tensor:
    return x.new_empty((x.shape[0], plan[0]))
