"""SparseLinear: one linear layer, its weight stored once, multiplied by whatever code is fastest at that M.

The only module of the service that imports the linear kernels and the dispatch table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels_ext import (
    BitmapWeight,
    LaneStreamWeight,
    bitmap_pack,
    build_info,
    dispatch,
    lane_stream_pack,
    lane_stream_unpack,
    lane_stream_workspace,
)
from kernels_ext.formats.lane_stream import MAX_BATCH_TOKENS
from kernels_ext.lane_stream import DTYPES as LANE_STREAM_DTYPES
from kernels_ext.lane_stream import estimated_bytes as lane_stream_bytes
from service.errors import BackendUnavailable, SettingsError

from .interface import LayerReport

# Token counts whose buckets a report lists. Powers of two reach every bucket that a table may draw.
_REPORTED_M = tuple(2**power for power in range(13))


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is to be stored, and the sentence that says why."""

    name: str
    reason: str


CompressedWeight = BitmapWeight | LaneStreamWeight

TIED_HEAD = Format("dense", "tied to the input embedding, whose rows are looked up")


def bitmap_bytes(N: int, K: int, nnz: int, itemsize: int) -> int:
    """Bytes of a ``[N, K]`` bitmap weight: values, one bit an element, one offset a row and the end."""
    return nnz * itemsize + N * -(-K // 8) + 8 * (N + 1)


def choose_format(
    N: int, K: int, dtype: torch.dtype, nnz: int, *, device: str, weights: str = "auto"
) -> Format:
    """Decide between compressed and ``dense`` storage for a ``[N, K]`` weight with ``nnz`` non-zeros.

    The compressed format is ``bitmap`` on a CPU and ``lane_stream`` on a GPU. It is taken when it is smaller
    and when dispatch expects it to be no slower (a bitmap: little slower) than a dense-stored weight at M=1,
    which is where a decode step spends its time.

    Args:
        N, K, dtype, nnz: the weight.
        device: "cpu" or "cuda".
        weights: "auto", or "dense" to keep every weight dense.
    """
    if weights == "dense":
        return Format("dense", "dense weights were asked for")
    if device == "cuda" and dtype not in LANE_STREAM_DTYPES:
        return Format("dense", f"no CUDA kernel multiplies by a compressed {dtype} weight")
    name = "lane_stream" if device == "cuda" else "bitmap"
    dense = N * K * dtype.itemsize
    packed = stored_bytes(name, N, K, nnz, dtype.itemsize)
    sparsity = 1 - nnz / (N * K) if N * K else 0.0
    if packed >= dense:
        gain_from = stored_bytes(name, N, K, 0, dtype.itemsize) / dense if dense else 1.0
        return Format(
            "dense",
            f"sparsity {sparsity:.3f} is too low: {name} would take {packed} bytes against {dense} dense "
            f"(it is smaller above sparsity {gain_from:.3f})",
        )
    choice: dispatch.Choice | dispatch.FormatChoice
    if name == "bitmap":
        choice = dispatch.choose_format(_table(device), dtype=dtype, N=N, K=K, sparsity=sparsity, M=1)
        is_slower = choice.format == "dense"
    else:
        choice = _choose(name, device, dtype, N, K, sparsity, 1)
        is_slower = choice.backend == "dense"
    if is_slower:
        return Format("dense", f"{name} is slower at M=1: {choice.reason}")
    return Format(
        name, f"sparsity {sparsity:.3f}: {packed} bytes against {dense} dense. At M=1, {choice.reason}"
    )


def stored_bytes(format: str, N: int, K: int, nnz: int, itemsize: int) -> int:
    """Bytes that a ``[N, K]`` weight takes in a format; for ``lane_stream``, which pads, an estimate."""
    if format == "dense":
        return N * K * itemsize
    return lane_stream_bytes(N, K, nnz) if format == "lane_stream" else bitmap_bytes(N, K, nnz, itemsize)


def describe(
    name: str,
    N: int,
    K: int,
    dtype: torch.dtype,
    nnz: int,
    stored: Format,
    *,
    device: str,
    measured_bytes: int | None = None,
) -> LayerReport:
    """Report on a layer that is, or would be, stored as ``stored`` says (in ``measured_bytes``, if known)."""
    sparsity = 1 - nnz / (N * K) if N * K else 0.0
    if measured_bytes is None:
        measured_bytes = stored_bytes(stored.name, N, K, nnz, dtype.itemsize)
    return LayerReport(
        name=name,
        N=N,
        K=K,
        dtype=str(dtype).removeprefix("torch."),
        format=stored.name,
        sparsity=sparsity,
        dense_bytes=N * K * dtype.itemsize,
        stored_bytes=measured_bytes,
        backends={
            dispatch.m_bucket(M): _choose(stored.name, device, dtype, N, K, sparsity, M).backend
            for M in _REPORTED_M
        },
        reason=stored.reason,
    )


@dataclass(slots=True)
class BoundLinear:
    """A layer's product for one bucket of M: what runs, and how often it was called through the layer."""

    backend: str
    bucket: str
    call: Callable[[Tensor], Tensor]
    calls: int = 0


class SparseLinear(nn.Module):
    """``y = x @ W.T + bias`` with W stored compressed or dense, never both.

    The backend is taken from the dispatch table once per bucket of M and kept. Not thread-safe: layers share
    one scratch buffer for decompressed weights and, on a GPU, one workspace: one stream at a time.

    Attributes:
        name: the layer's name in the checkpoint; a fused layer has a name of its own.
        N, K: out and in features.
        weight: ``[N, K]`` tensor, or the compressed weight.
        bias: ``[N]`` in the weight's dtype, or None.
        stored: the format and why it was chosen.
        nnz: non-zero elements of W.
    """

    def __init__(
        self,
        name: str,
        weight: Tensor | CompressedWeight,
        bias: Tensor | None,
        stored: Format,
        nnz: int | None = None,
    ) -> None:
        """Take over a weight. ``nnz`` spares counting where the caller knows it.

        Raises:
            ValueError: the bias does not fit the weight.
        """
        super().__init__()
        self.name = name
        self.weight = weight
        self.bias = bias
        self.stored = stored
        if isinstance(weight, Tensor):
            self.N, self.K = weight.shape
            self.device = weight.device
            self.nnz = int(torch.count_nonzero(weight)) if nnz is None else nnz
        else:
            self.N, self.K = weight.N, weight.K
            self.device = weight.values.device if isinstance(weight, BitmapWeight) else weight.device
            self.nnz = weight.nnz
        if isinstance(weight, LaneStreamWeight):
            _reserve_workspace(weight)
        self.dtype = weight.dtype
        if bias is not None and (bias.shape != (self.N,) or bias.dtype != self.dtype):
            raise ValueError(
                f"linear {name}: bias must be [{self.N}] {self.dtype}, got {list(bias.shape)} {bias.dtype}"
            )
        self._bound: dict[str, BoundLinear] = {}
        self._by_tokens: dict[int, BoundLinear] = {}

    def bind(self, M: int) -> BoundLinear:
        """The product for M tokens; its `call` takes a contiguous ``[M, K]`` and returns ``[M, N]``."""
        bucket = dispatch.m_bucket(M)
        bound = self._bound.get(bucket)
        if bound is None:
            sparsity = 1 - self.nnz / (self.N * self.K) if self.N * self.K else 0.0
            choice = _choose(self.stored.name, self.device.type, self.dtype, self.N, self.K, sparsity, M)
            bound = self._bound[bucket] = BoundLinear(choice.backend, bucket, self._product(choice.backend))
        return bound

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., K]`` in the weight's dtype; returns ``[..., N]``."""
        rows = x.reshape(-1, self.K).contiguous()
        M = rows.shape[0]
        bound = self._by_tokens.get(M)
        if bound is None:
            bound = self._by_tokens[M] = self.bind(M)
        bound.calls += 1
        y: Tensor = bound.call(rows)
        return y.view(*x.shape[:-1], self.N)

    def dense(self) -> Tensor:
        """The weight as a new or the stored ``[N, K]`` tensor. For checks, not for the way of a request."""
        if isinstance(self.weight, Tensor):
            return self.weight
        out = torch.empty((self.N, self.K), dtype=self.dtype, device=self.device)
        _unpack_into(out, self.weight)
        return out

    def calls(self) -> dict[str, int]:
        """Calls through `forward` since load by "backend|m_bucket"."""
        return {
            f"{bound.backend}|{bound.bucket}": bound.calls for bound in self._bound.values() if bound.calls
        }

    def reset_calls(self) -> None:
        """Start counting anew."""
        for bound in self._bound.values():
            bound.calls = 0

    def report(self) -> LayerReport:
        """Describe the layer as stored, with the backend for every bucket of M."""
        return describe(
            self.name,
            self.N,
            self.K,
            self.dtype,
            self.nnz,
            self.stored,
            device=self.device.type,
            measured_bytes=None if isinstance(self.weight, Tensor) else self.weight.stored_bytes,
        )

    def extra_repr(self) -> str:
        """What nn.Module prints between the parentheses."""
        return f"{self.name}, N={self.N}, K={self.K}, format={self.stored.name}"

    def _product(self, backend: str) -> Callable[[Tensor], Tensor]:
        """A function of x alone, with the op and the tensors bound: it runs hundreds of times a token."""
        weight, bias = self.weight, self.bias
        if isinstance(weight, Tensor):
            if backend == "dense":
                return functools.partial(F.linear, weight=weight, bias=bias)
            dense_linear = torch.ops.kernels_ext.dense_linear.default
            return lambda x: dense_linear(x, weight, bias)
        if backend == "dense":
            return functools.partial(_decompressed_linear, packed=weight, bias=bias)
        if isinstance(weight, LaneStreamWeight):
            lane_stream_linear = torch.ops.kernels_ext.lane_stream_linear.default
            data, descriptors, numbers, device = (
                weight.data,
                weight.descriptors,
                weight.plan.numbers,
                weight.device,
            )
            return lambda x: lane_stream_linear(x, data, descriptors, bias, _workspaces[device], numbers)
        bitmap_linear = torch.ops.kernels_ext.bitmap_linear.default
        bitmap, values, row_offsets = weight.bitmap, weight.values, weight.row_offsets
        return lambda x: bitmap_linear(x, bitmap, values, row_offsets, bias)


def pack(weight: Tensor | BitmapWeight, stored: Format, room: BitmapWeight | None = None) -> CompressedWeight:
    """Compress a ``[N, K]`` weight, on the device where it is; the caller drops what it gave.

    ``room`` is where a dense weight's bitmap is to lie, with space for just its non-zeros.
    """
    if stored.name == "lane_stream":
        return lane_stream_pack(weight)
    return weight if isinstance(weight, BitmapWeight) else bitmap_pack(weight, out=room)


def kernel_facts(device: str = "cpu") -> dict[str, str]:
    """What the compiled kernels are here, for the log, /version and /metrics.

    Keys: ``cpu_isa``, ``cuda_kernels`` ("yes" or "no"), ``cuda_reason``: how they were built, or why not, and
    ``dispatch_table``: where the device's measured times come from.
    """
    build = build_info()
    return {
        "cpu_isa": build.cpu_isa,
        "cuda_kernels": "yes" if build.cuda_loaded else "no",
        "cuda_reason": build.cuda_reason,
        "dispatch_table": _table(device).source,
    }


# What a step of either forward code calls; a device that lacks one of these cannot serve.
_STEP_OPS = ("rms_norm", "add_rms_norm", "rope_kv_write", "paged_attention", "silu_mul")


def require_device(device: str) -> torch.device:
    """Return the torch device, or say why this build cannot serve on it.

    Args:
        device: "cpu", "cuda" or "cuda:1" and the like.

    Raises:
        BackendUnavailable: the build or the machine has no kernels for the device.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise BackendUnavailable(f"device must be cpu or cuda, got {device!r}")
    if kind == "cuda":
        build = build_info()
        if not build.cuda_built:
            raise BackendUnavailable(
                f"device cuda needs CUDA kernels, but this build has none ({build.cuda_reason}). "
                "Reinstall with -C cmake.define.KERNELS_CUDA=ON, or set LACUNAR_DEVICE=cpu."
            )
        if not build.cuda_loaded:
            raise BackendUnavailable(
                f"device cuda needs CUDA kernels, but they did not load ({build.cuda_reason}). "
                "Install a CUDA build of torch, or set LACUNAR_DEVICE=cpu."
            )
        if not torch.cuda.is_available():
            raise BackendUnavailable(
                "device cuda needs an NVIDIA GPU, but torch sees none. Check the driver, or set "
                "LACUNAR_DEVICE=cpu."
            )
        missing = [op for op in _STEP_OPS if not _has_kernel(op, "CUDA")]
        if missing:
            raise BackendUnavailable(
                f"device cuda needs CUDA kernels for {', '.join(missing)}, which this version does not have "
                "yet. Set LACUNAR_DEVICE=cpu."
            )
    return torch.device(device)


def _has_kernel(op: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"kernels_ext::{op}", key))


def _table(device: str) -> dispatch.Table:
    try:
        return dispatch.default_table(device)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _choose(
    stored: str, device: str, dtype: torch.dtype, N: int, K: int, sparsity: float, M: int
) -> dispatch.Choice:
    return dispatch.choose(
        _table(device), device=device, format=stored, dtype=dtype, N=N, K=K, sparsity=sparsity, M=M
    )


# One buffer per dtype for decompressed weights, as large as the largest layer that needed it so far.
_scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _decompressed_linear(x: Tensor, packed: CompressedWeight, bias: Tensor | None) -> Tensor:
    key = (x.device, packed.dtype)
    size = packed.N * packed.K
    buffer = _scratch.get(key)
    if buffer is None or buffer.numel() < size:
        # The old buffer goes first, so that both never exist at once.
        _scratch.pop(key, None)
        buffer = _scratch[key] = torch.empty(size, dtype=packed.dtype, device=x.device)
    dense = buffer[:size].view(packed.N, packed.K)
    _unpack_into(dense, packed)
    return F.linear(x, dense, bias)


def _unpack_into(out: Tensor, packed: CompressedWeight) -> None:
    if isinstance(packed, LaneStreamWeight):
        lane_stream_unpack(packed, out)
    else:
        torch.ops.kernels_ext.bitmap_unpack_into.default(
            out, packed.bitmap, packed.values, packed.row_offsets
        )


# One workspace per device for the lane-stream kernel, as large as the layer that needs most.
_workspaces: dict[torch.device, Tensor] = {}


def _reserve_workspace(weight: LaneStreamWeight) -> None:
    workspace = _workspaces.get(weight.device)
    if workspace is None or workspace.numel() < weight.plan.workspace_bytes(MAX_BATCH_TOKENS):
        _workspaces[weight.device] = lane_stream_workspace(weight)
