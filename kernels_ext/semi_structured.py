"""2:4 weights on the GPU: detection, packing, the linear op for up to 64 tokens, unpacking, and cuSPARSELt.

The own form is specified in formats/SEMI_STRUCTURED.md; formats/semi_structured.py is its slow reference. Its
linear op needs a GPU of compute capability 9.0 or newer. cuSPARSELt has a form of its own, whose layout is
not documented: `CuSparseLtWeight` holds that one. A layer keeps the one that serves its token counts; keeping
both is the caller's decision and takes 1.125 bytes an element twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch
from torch import Tensor

from .build_info import build_info
from .formats import semi_structured as reference
from .formats.semi_structured import GROUP_BYTES, GROUP_COLUMNS, ROW_TILES, STRIP_ROWS
from .lane_stream import DTYPES, DeviceShape

MAX_TOKENS: Final = 64  # of one launch
MAX_STRIPS: Final = 1 << 16
COUNTER_BYTES: Final = MAX_STRIPS * 4

_ops = torch.ops.kernels_ext


class SemiStructuredUnavailable(RuntimeError):
    """This build or this GPU has no 2:4 kernels; the message says which and what to do."""


def is_semi_structured(weight: Tensor) -> bool:
    """Whether every four neighbours of a row, from a multiple of 4 on, have at most two non-zeros."""
    if weight.dim() != 2:
        return False
    padded = torch.nn.functional.pad(weight != 0, (0, -weight.shape[1] % 4))
    return bool((padded.view(weight.shape[0], -1, 4).sum(-1) <= 2).all())


def token_tiles(M: int) -> int:
    """Tiles of 8 tokens that a launch for M tokens computes: 1, 2, 4 or 8."""
    return 1 if M <= 8 else 2 if M <= 16 else 4 if M <= 32 else 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SemiStructuredPlan:
    """How a launch shares out a matrix's groups (csrc/cuda/semi_structured.cuh); not how it is stored.

    Attributes:
        N, K: shape of the weight.
        k_slices: parts of K that different blocks take.
        strips_per_block: strips of 32 rows that a block takes.
        warps: of a block.
        k_warps: warps that share a strip, each with its own part of the slice; divides `warps`.
        x_groups: columns of x in shared memory at a time for each part, in groups of 128.
        ring_slots: groups in flight for each warp.
    """

    N: int
    K: int
    k_slices: int
    strips_per_block: int
    warps: int
    k_warps: int
    x_groups: int
    ring_slots: int

    @property
    def numbers(self) -> list[int]:
        """As the op takes it."""
        return [getattr(self, name) for name in self.__slots__]

    @property
    def strips(self) -> int:
        """Strips of the matrix."""
        return -(-self.N // STRIP_ROWS)

    @property
    def parts(self) -> int:
        """Parts of K whose sums are added at the end."""
        return self.k_slices * self.k_warps

    @property
    def part_groups(self) -> int:
        """Most groups of a strip that a warp takes."""
        groups = -(-self.K // GROUP_COLUMNS)
        return -(-groups // self.parts)

    @property
    def blocks(self) -> int:
        """Of a launch."""
        return -(-self.strips // self.strips_per_block) * self.k_slices

    @property
    def rounds(self) -> int:
        """Strips that a warp takes, one after another."""
        return -(-self.strips_per_block // (self.warps // self.k_warps))

    def shared_bytes(self, M: int) -> int:
        """Shared memory of a block in a launch for M tokens."""
        x_bytes = self.k_warps * token_tiles(M) * 8 * (self.x_groups * GROUP_COLUMNS * 2 + 16)
        buffers = 1 if self.part_groups <= self.x_groups else 2
        barriers = -(-self.warps * self.ring_slots * 8 // 128) * 128
        return self.warps * self.ring_slots * GROUP_BYTES + barriers + buffers * x_bytes

    def workspace_bytes(self, M: int) -> int:
        """Workspace of a launch for M tokens."""
        parts = self.parts if self.parts > 1 else 0
        return COUNTER_BYTES + self.strips * parts * ROW_TILES * token_tiles(M) * 512


def candidate_plans(N: int, K: int, M: int, device: DeviceShape) -> list[SemiStructuredPlan]:
    """Every plan worth considering for M tokens: one or two blocks for every multiprocessor at once."""
    strips, columns = -(-N // STRIP_ROWS), -(-K // GROUP_COLUMNS)
    most_warps = 12 if token_tiles(M) == 8 else 16
    out = []
    for blocks_per_multiprocessor in (1, 2):
        blocks = device.multiprocessors * blocks_per_multiprocessor
        limit = min(
            device.shared_bytes_per_block,
            device.shared_bytes_per_multiprocessor // blocks_per_multiprocessor - 1024,
        )
        for k_slices in (1, 2, 4, 7, 8, 14, 16, 28, 32):
            if k_slices > columns or k_slices > blocks:
                continue
            strips_per_block = -(-strips // max(1, blocks // k_slices))
            for k_warps in (1, 2, 4, 8):
                if k_slices * k_warps > columns:
                    continue
                for row_warps in range(1, most_warps // k_warps + 1):
                    if row_warps > strips_per_block:
                        break
                    plan = SemiStructuredPlan(
                        N=N,
                        K=K,
                        k_slices=k_slices,
                        strips_per_block=strips_per_block,
                        warps=row_warps * k_warps,
                        k_warps=k_warps,
                        x_groups=1,
                        ring_slots=1,
                    )
                    fitted = _fit_shared(plan, M, limit)
                    if fitted is not None:
                        out.append(fitted)
    return out


def _fit_shared(plan: SemiStructuredPlan, M: int, limit: int) -> SemiStructuredPlan | None:
    """The plan with as much of x and as deep a ring as fit, x in phases of at least 2 groups."""
    for x_groups in sorted({min(plan.part_groups, n) for n in (4, 2)}, reverse=True):
        for ring_slots in (4, 3, 2):
            slots = min(ring_slots, plan.part_groups * plan.rounds)
            numbers = [*plan.numbers[:6], x_groups, slots]
            fitted = _plan_of(numbers)
            if fitted.shared_bytes(M) <= limit:
                return fitted
    return None


def best_plan(N: int, K: int, M: int, device: DeviceShape) -> SemiStructuredPlan:
    """The candidate that a small model of the kernel expects to be fastest.

    Raises:
        ValueError: the device has too little shared memory for any plan.
    """
    candidates = candidate_plans(N, K, M, device)
    if not candidates:
        raise ValueError(
            f"semi_structured: no plan for N={N} K={K} M={M} fits "
            f"{device.shared_bytes_per_block} bytes of shared memory a block"
        )
    return min(candidates, key=lambda plan: expected_clocks(plan, M, device))


# Of the model below, in clocks of one multiprocessor at 1.755 GHz: grid search over 6000 launches of a
# prototype on an H200 (six shapes; 1 to 64 tokens). Its pick took 7% longer than the best on average.
_FILL_BYTES: Final = 19.0  # from memory, per clock
_FRAGMENT_CLOCKS: Final = 8.0  # shared-memory read and two multiplications of one x fragment
_SUM_CLOCKS: Final = 800.0  # to hand over a strip's sums
_PART_CLOCKS: Final = 20.0  # for each part and token tile
_PHASE_CLOCKS: Final = 150.0  # to change to the next columns of x
_LAUNCH_CLOCKS: Final = 6500.0
_BLOCK_CLOCKS: Final = 150.0  # for a second block on a multiprocessor, which reads x again
_WARP_CLOCKS: Final = 40.0  # for each warp fewer than 7 or more than 8, the best counts measured


def expected_clocks(plan: SemiStructuredPlan, M: int, device: DeviceShape) -> float:
    """What a small model expects a launch to take."""
    tiles = token_tiles(M)
    per_multiprocessor = -(-plan.blocks // device.multiprocessors)
    groups = per_multiprocessor * plan.warps * plan.part_groups * plan.rounds
    fill = groups * GROUP_BYTES / _FILL_BYTES
    warps = per_multiprocessor * plan.warps
    # With few warps the four schedulers wait for shared-memory reads; 7 is the least that was measured to do.
    multiply = groups * tiles * 4 * _FRAGMENT_CLOCKS * max(1.0, 7 / warps)
    sums = plan.rounds * _SUM_CLOCKS + _PART_CLOCKS * plan.parts * tiles if plan.parts > 1 else 0.0
    phases = -(-plan.part_groups // plan.x_groups)
    x = plan.rounds * phases * _PHASE_CLOCKS if phases > 1 else 0.0
    x += plan.k_warps * min(plan.part_groups, plan.x_groups) * M * 4
    uneven = _WARP_CLOCKS * max(0, 7 - warps, warps - 8)
    return float(
        (fill**3 + multiply**3) ** (1 / 3)
        + sums
        + x
        + uneven
        + _BLOCK_CLOCKS * (per_multiprocessor - 1)
        + _LAUNCH_CLOCKS
    )


@dataclass(frozen=True, slots=True, eq=False)
class SemiStructuredWeight:
    """An ``[N, K]`` matrix in the 2:4 form, on one CUDA device.

    Attributes:
        N, K: its shape.
        dtype: float16 or bfloat16, of the elements and so of x and y.
        data: uint8, all groups.

    Raises:
        ValueError: a shape, dtype or device does not hold. `validate` checks the contents.
    """

    N: int
    K: int
    dtype: torch.dtype
    data: Tensor
    _plans: dict[int, SemiStructuredPlan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"SemiStructuredWeight N={self.N} K={self.K}"
        if self.dtype not in DTYPES:
            raise ValueError(f"{where}: dtype must be float16 or bfloat16, got {self.dtype}")
        want = (reference.group_count(self.N, self.K) * GROUP_BYTES,)
        if self.data.dtype != torch.uint8 or self.data.shape != want or not self.data.is_contiguous():
            raise ValueError(
                f"{where}: data must be contiguous uint8 {want}, "
                f"got {self.data.dtype} {tuple(self.data.shape)}"
            )

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.data.device

    @property
    def stored_bytes(self) -> int:
        """Bytes of the data."""
        return self.data.numel()

    def plan(self, M: int) -> SemiStructuredPlan:
        """The plan for M tokens, chosen once for each number of token tiles."""
        tiles = token_tiles(M)
        if tiles not in self._plans:
            self._plans[tiles] = best_plan(self.N, self.K, tiles * 8, DeviceShape.of(self.device))
        return self._plans[tiles]

    def validate(self) -> SemiStructuredWeight:
        """Check everything that the kernels trust, on the CPU; returns self.

        Raises:
            ValueError: see `formats.semi_structured.validate`.
        """
        reference.validate(self.data.cpu().numpy(), self.N, self.K)
        return self


def _need_cuda_kernels() -> None:
    info = build_info()
    if not info.cuda_loaded:
        raise SemiStructuredUnavailable(
            f"format semi_structured needs CUDA kernels, but this build has none ({info.cuda_reason}). "
            "Reinstall with -C cmake.define.KERNELS_CUDA=ON under a CUDA build of torch."
        )


def semi_structured_pack(weight: Tensor) -> SemiStructuredWeight:
    """Pack a matrix on its GPU.

    Args:
        weight: ``[N, K]`` float16 or bfloat16 on a CUDA device, N, K >= 1, with at most two non-zeros in
            every four neighbours. Zeros of either sign count as zero and come back as +0.0.

    Raises:
        ValueError: a shape, dtype or device above does not hold, or the matrix is not 2:4.
        SemiStructuredUnavailable: the build has no CUDA kernels.
    """
    _need_cuda_kernels()
    dense = weight.contiguous()
    if dense.dim() != 2 or 0 in dense.shape:
        raise ValueError(
            f"semi_structured_pack: weight must be [N, K] with N, K >= 1, got shape {tuple(dense.shape)}"
        )
    if dense.dtype not in DTYPES:
        raise ValueError(f"semi_structured_pack: weight must be float16 or bfloat16, got {dense.dtype}")
    if dense.device.type != "cuda":
        raise ValueError(f"semi_structured_pack: weight must be on a CUDA device, got {dense.device}")
    data, violations = _ops.semi_structured_pack(dense.view(torch.int16))
    if int(violations):
        raise ValueError(
            f"semi_structured_pack: {int(violations)} groups of four elements have more than two non-zeros"
        )
    return SemiStructuredWeight(dense.shape[0], dense.shape[1], dense.dtype, data)


def semi_structured_unpack(weight: SemiStructuredWeight, out: Tensor | None = None) -> Tensor:
    """The dense ``[N, K]`` matrix.

    Args:
        weight: a valid weight.
        out: contiguous ``[N, K]`` in the weight's dtype to write to; None allocates.

    Raises:
        ValueError: `out` does not fit the weight.
        SemiStructuredUnavailable: the build has no CUDA kernels.
    """
    _need_cuda_kernels()
    if out is None:
        out = torch.empty(weight.N, weight.K, dtype=weight.dtype, device=weight.device)
    elif out.shape != (weight.N, weight.K) or out.dtype != weight.dtype or not out.is_contiguous():
        raise ValueError(
            f"semi_structured_unpack: out must be a contiguous [{weight.N}, {weight.K}] {weight.dtype}, "
            f"got shape {tuple(out.shape)} {out.dtype} strides {out.stride()}"
        )
    _ops.semi_structured_unpack_into(out.view(torch.int16), weight.data)
    return out


def semi_structured_workspace(*weights: SemiStructuredWeight) -> Tensor:
    """A workspace large enough for each of the weights and any token count, on their device.

    Launches that may run at the same time (on two streams) need one each; others share.
    """
    if not weights:
        raise ValueError("semi_structured_workspace: give at least one weight")
    needed = max(w.plan(M).workspace_bytes(M) for w in weights for M in (8, 16, 32, 64))
    return torch.zeros(needed, dtype=torch.uint8, device=weights[0].device)


def semi_structured_linear(
    x: Tensor,
    weight: SemiStructuredWeight,
    workspace: Tensor,
    bias: Tensor | None = None,
    *,
    plan: SemiStructuredPlan | None = None,
    overlap_launch: bool = True,
) -> Tensor:
    """Multiply activations by a 2:4 weight: ``y = x @ W.T + bias``.

    One kernel launch, safe to capture in a CUDA graph. The same input always gives the same bits.

    Args:
        x: ``[M, K]`` in the weight's dtype, contiguous, 0 <= M <= 64.
        weight: a valid weight.
        workspace: from `semi_structured_workspace`; all zero before its first use.
        bias: ``[N]`` in the weight's dtype, or None.
        plan: None takes `weight.plan(M)`.
        overlap_launch: let the kernel fetch weights while the kernel before it in the stream still runs.

    Returns:
        ``[M, N]`` in the weight's dtype. Products are summed in float32 and rounded once.

    Raises:
        ValueError: a shape, dtype or device above does not hold.
    """
    if x.dim() != 2 or x.shape[1] != weight.K:
        raise ValueError(
            f"semi_structured_linear: x has shape {tuple(x.shape)}, but the weight has K={weight.K}, "
            f"so x must be [M, {weight.K}]"
        )
    M = x.shape[0]
    if M > MAX_TOKENS:
        raise ValueError(f"semi_structured_linear: x has {M} rows, at most {MAX_TOKENS} are possible")
    if x.dtype != weight.dtype or x.device != weight.device or not x.is_contiguous():
        raise ValueError(
            f"semi_structured_linear: x must be contiguous {weight.dtype} on {weight.device}, "
            f"got {x.dtype} on {x.device} with strides {x.stride()}"
        )
    if bias is not None and (bias.shape != (weight.N,) or bias.dtype != weight.dtype):
        raise ValueError(
            f"semi_structured_linear: bias must be [{weight.N}] {weight.dtype}, "
            f"got shape {tuple(bias.shape)} {bias.dtype}"
        )
    chosen = plan or weight.plan(M)
    needed = chosen.workspace_bytes(M)
    if workspace.numel() < needed:
        raise ValueError(
            f"semi_structured_linear: workspace has {workspace.numel()} bytes, this launch needs {needed}"
        )
    y: Tensor = _ops.semi_structured_linear(x, weight.data, bias, workspace, chosen.numbers, overlap_launch)
    return y


# --- cuSPARSELt ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class CuSparseLtWeight:
    """An ``[N, K]`` 2:4 matrix in cuSPARSELt's form, and the algorithm found for each token count.

    Attributes:
        N, K: its shape.
        packed: what torch._cslt_compress made.
        algorithms: by the number of rows multiplied, filled by `search`.
    """

    N: int
    K: int
    packed: Tensor
    algorithms: dict[int, int] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packed form."""
        return self.packed.numel() * self.packed.element_size()

    def search(self, x: Tensor) -> int:
        """Find the fastest algorithm for x's token count, once, in 0.02 to 4 s; never inside a capture.

        The default algorithm takes 1.0 to 3 times as long as the one found (H200, M = 16 to 8192).
        """
        rows = x.shape[0] + -x.shape[0] % 8
        if rows not in self.algorithms:
            padded = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
            self.algorithms[rows] = int(torch._cslt_sparse_mm_search(self.packed, padded.T))
        return self.algorithms[rows]


def cusparselt_pack(weight: Tensor) -> CuSparseLtWeight:
    """Compress a 2:4 matrix by cuSPARSELt.

    Args:
        weight: ``[N, K]`` float16 or bfloat16 on a CUDA device, N a multiple of 32 and K of 64.

    Raises:
        ValueError: the shape does not hold, or the matrix is not 2:4 (cuSPARSELt would drop elements).
    """
    if weight.dim() != 2 or weight.shape[0] % 32 or weight.shape[1] % 64 or 0 in weight.shape:
        raise ValueError(
            "cusparselt_pack: weight must be [N, K] with N a multiple of 32 and K of 64, "
            f"got shape {tuple(weight.shape)}"
        )
    if not is_semi_structured(weight):
        raise ValueError("cusparselt_pack: some four neighbours have more than two non-zeros")
    return CuSparseLtWeight(weight.shape[0], weight.shape[1], torch._cslt_compress(weight.contiguous()))


def cusparselt_linear(x: Tensor, weight: CuSparseLtWeight) -> Tensor:
    """``y = x @ W.T`` by the algorithm that `CuSparseLtWeight.search` found for x's token count.

    Args:
        x: ``[M, K]``, contiguous, M >= 1; copied where M is not a multiple of 8.

    Raises:
        ValueError: no algorithm was searched for this token count.
    """
    M = x.shape[0]
    rows = M + -M % 8
    if rows not in weight.algorithms:
        raise ValueError(f"cusparselt_linear: no algorithm for {rows} rows; call search first")
    padded = x if rows == M else torch.nn.functional.pad(x, (0, 0, 0, rows - M))
    return torch._cslt_sparse_mm(weight.packed, padded.T, alg_id=weight.algorithms[rows]).T[:M]


# --- fake kernels: shapes and dtypes alone, for torch.compile -----------------------------------------------


_Fake = TypeVar("_Fake", bound=Callable[..., object])


def _register_fake(op: str) -> Callable[[_Fake], _Fake]:
    """torch.library.register_fake, with the type that it lacks."""
    register: Callable[[_Fake], _Fake] = torch.library.register_fake(f"kernels_ext::{op}")
    return register


def _plan_of(numbers: list[int]) -> SemiStructuredPlan:
    return SemiStructuredPlan(**dict(zip(SemiStructuredPlan.__slots__, numbers, strict=True)))


@_register_fake("semi_structured_pack")
def _(dense: Tensor) -> tuple[Tensor, Tensor]:
    size = reference.group_count(int(dense.shape[0]), int(dense.shape[1])) * GROUP_BYTES
    return dense.new_empty((size,), dtype=torch.uint8), dense.new_empty((1,), dtype=torch.int32)


@_register_fake("semi_structured_unpack_into")
def _(dense: Tensor, data: Tensor) -> None:
    return None


@_register_fake("semi_structured_linear")
def _(
    x: Tensor,
    data: Tensor,
    bias: Tensor | None,
    workspace: Tensor,
    plan: list[int],
    overlap_launch: bool = True,
) -> Tensor:
    return x.new_empty((x.shape[0], plan[0]))
