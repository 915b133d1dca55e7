"""Linear ops and the weight type they work on.

The functions check their arguments and call the ops in ``torch.ops.kernels_ext``, which run under
torch.compile: each has a fake kernel here. Letters: ``y[M, N] = x[M, K] @ W[N, K].T``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

# Numbers of csrc/cpu/isa.h, in order: a processor that has one has all those before it.
ISAS: Final = {"generic": 1, "avx2": 2, "avx512": 3}

_ops = torch.ops.kernels_ext


def cpu_isa() -> str:
    """The instruction set that the CPU kernels use here: "avx512", "avx2" or "generic"."""
    number = _ops.cpu_isa()
    return next(name for name, value in ISAS.items() if value == number)


def available_isas() -> tuple[str, ...]:
    """Every instruction set that this processor can run, best first."""
    best = ISAS[cpu_isa()]
    return tuple(name for name, number in reversed(ISAS.items()) if number <= best)


def _isa_number(isa: str | None) -> int:
    if isa is None:
        return 0
    if isa not in ISAS:
        raise ValueError(f"isa must be one of {', '.join(ISAS)}, got {isa!r}")
    if ISAS[isa] > ISAS[cpu_isa()]:
        raise ValueError(f"isa {isa!r} was asked for, but this processor has {cpu_isa()!r}")
    return ISAS[isa]


@dataclass(frozen=True, slots=True, eq=False)
class BitmapWeight:
    """An ``[N, K]`` matrix stored as one bit per element and its non-zeros (formats/BITMAP.md).

    Construction checks what costs nothing to check: dtypes, shapes, layout. Call `validate` on anything that
    was not made by `bitmap_pack`: the kernels trust the contents.

    Attributes:
        N: rows, the layer's out features.
        K: columns, the layer's in features.
        bitmap: uint8 ``[N, ceil(K/8)]``; bit ``k % 8`` (least significant first) of byte ``k // 8`` is set if
            element ``k`` of the row is stored.
        values: ``[nnz]`` float32, bfloat16 or float16; the stored elements in row-major order.
        row_offsets: int64 ``[N + 1]``; row ``n`` owns ``values[row_offsets[n]:row_offsets[n + 1]]``.

    Raises:
        ValueError: a shape, dtype, device or layout above does not hold.
    """

    N: int
    K: int
    bitmap: Tensor
    values: Tensor
    row_offsets: Tensor

    def __post_init__(self) -> None:
        if self.N < 0 or self.K < 0:
            raise ValueError(f"BitmapWeight: N and K must be at least 0, got N={self.N} K={self.K}")
        where = f"BitmapWeight N={self.N} K={self.K}"
        for name, tensor, dtypes in (
            ("bitmap", self.bitmap, (torch.uint8,)),
            ("values", self.values, DTYPES),
            ("row_offsets", self.row_offsets, (torch.int64,)),
        ):
            if tensor.dtype not in dtypes:
                wanted = " or ".join(str(d) for d in dtypes)
                raise ValueError(f"{where}: {name} must be {wanted}, got {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError(f"{where}: {name} must be contiguous, got strides {tensor.stride()}")
            if tensor.device != self.values.device:
                raise ValueError(
                    f"{where}: {name} is on {tensor.device}, but values are on {self.values.device}"
                )
        for name, tensor, shape in (
            ("bitmap", self.bitmap, (self.N, (self.K + 7) // 8)),
            ("row_offsets", self.row_offsets, (self.N + 1,)),
        ):
            if tensor.shape != shape:
                raise ValueError(f"{where}: {name} must have shape {shape}, got {tuple(tensor.shape)}")
        if self.values.dim() != 1:
            raise ValueError(f"{where}: values must be 1-D, got shape {tuple(self.values.shape)}")

    def validate(self) -> BitmapWeight:
        """Check that bitmap, offsets and values agree, so that the kernels can trust them; returns self.

        Reads the bitmap and the offsets once, not the values.

        Raises:
            ValueError: they disagree; the message names the first row at fault.
        """
        where = f"BitmapWeight N={self.N} K={self.K}"
        if int(self.row_offsets[0]) != 0:
            raise ValueError(f"{where}: row_offsets must start with 0, got {int(self.row_offsets[0])}")
        if int(self.row_offsets[-1]) != self.nnz:
            raise ValueError(
                f"{where}: row_offsets end with {int(self.row_offsets[-1])}, but there are {self.nnz} values"
            )
        counts = _ops.bitmap_row_counts(self.bitmap.cpu())
        claimed = self.row_offsets.cpu().diff()
        wrong = (counts != claimed).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"{where}: row {row} has {int(counts[row])} bits set, but row_offsets give it "
                f"{int(claimed[row])} values ({len(wrong)} of {self.N} rows disagree)"
            )
        padding_bits = -self.K % 8
        if padding_bits and self.N:
            mask = (0xFF << (8 - padding_bits)) & 0xFF
            wrong = (self.bitmap[:, -1] & mask).nonzero()
            if len(wrong):
                raise ValueError(
                    f"{where}: row {int(wrong[0])} has bits set beyond column {self.K - 1} "
                    f"({len(wrong)} of {self.N} rows do)"
                )
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of the values, and so of x and y."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where all three tensors are."""
        return self.values.device

    @property
    def nnz(self) -> int:
        """Stored elements."""
        return self.values.numel()

    @property
    def sparsity(self) -> float:
        """Share of elements that are not stored, 0 to 1; 0 for an empty matrix."""
        return 1 - self.nnz / (self.N * self.K) if self.N * self.K else 0.0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the three tensors together."""
        return sum(t.numel() * t.element_size() for t in (self.bitmap, self.values, self.row_offsets))

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same matrix stored densely."""
        return self.N * self.K * self.values.element_size()


def bitmap_pack(dense: Tensor, isa: str | None = None, *, out: BitmapWeight | None = None) -> BitmapWeight:
    """Pack a dense matrix. An element is stored unless all its bits are zero, so -0.0 is stored.

    Args:
        dense: ``[N, K]`` float32, bfloat16 or float16 on the CPU; any strides.
        isa: an instruction set of `available_isas`, or None for the best.
        out: a weight of the same shape, dtype and number of stored elements to write to, whatever it holds;
            None allocates.

    Returns:
        `out`, or a new weight.

    Raises:
        ValueError: a shape, dtype or device above does not hold, or `out` has room for more or fewer elements
            than there are to store; `out` then holds no valid weight.
    """
    _check_dense("bitmap_pack", "dense", dense)
    if out is not None:
        if dense.shape != (out.N, out.K) or out.dtype != dense.dtype or out.device != dense.device:
            raise ValueError(
                f"bitmap_pack: out must be [{dense.shape[0]}, {dense.shape[1]}] {dense.dtype} on the CPU, "
                f"got [{out.N}, {out.K}] {out.dtype} on {out.device}"
            )
        _ops.bitmap_pack_into(dense.contiguous(), out.bitmap, out.values, out.row_offsets, _isa_number(isa))
        return out
    bitmap, values, row_offsets = _ops.bitmap_pack(dense.contiguous(), _isa_number(isa))
    return BitmapWeight(dense.shape[0], dense.shape[1], bitmap, values, row_offsets)


def bitmap_unpack(weight: BitmapWeight, out: Tensor | None = None, isa: str | None = None) -> Tensor:
    """The dense ``[N, K]`` matrix, bit for bit what was packed.

    Args:
        weight: a valid weight on the CPU.
        out: contiguous ``[N, K]`` in the weight's dtype to write to, e.g. a scratch buffer that layers share;
            None allocates.
        isa: an instruction set of `available_isas`, or None for the best.

    Raises:
        ValueError: `out` does not fit the weight.
    """
    if out is None:
        out = torch.empty(weight.N, weight.K, dtype=weight.dtype, device=weight.device)
    elif out.shape != (weight.N, weight.K) or out.dtype != weight.dtype or not out.is_contiguous():
        raise ValueError(
            f"bitmap_unpack: out must be a contiguous [{weight.N}, {weight.K}] {weight.dtype}, "
            f"got shape {tuple(out.shape)} {out.dtype} strides {out.stride()}"
        )
    _ops.bitmap_unpack_into(out, weight.bitmap, weight.values, weight.row_offsets, _isa_number(isa))
    return out


def bitmap_linear(
    x: Tensor, weight: BitmapWeight, bias: Tensor | None = None, isa: str | None = None
) -> Tensor:
    """Multiply activations by a bitmap weight: ``y = x @ W.T + bias``.

    Args:
        x: ``[M, K]`` in the weight's dtype, contiguous. Any M >= 0; made for small M.
        weight: a valid weight.
        bias: ``[N]`` in the weight's dtype, or None.
        isa: an instruction set of `available_isas`, or None for the best.

    Returns:
        ``[M, N]`` in the weight's dtype. Products are summed in float32 and rounded once.

    Raises:
        ValueError: a shape or dtype above does not hold.
    """
    _check_linear("bitmap_linear", x, bias, weight.N, weight.K, weight.dtype)
    y: Tensor = _ops.bitmap_linear(
        x, weight.bitmap, weight.values, weight.row_offsets, bias, _isa_number(isa)
    )
    return y


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, isa: str | None = None) -> Tensor:
    """Multiply activations by a dense weight with a kernel made for small M: ``y = x @ W.T + bias``.

    Args:
        x: ``[M, K]`` in the weight's dtype, contiguous. Any M >= 0; made for small M.
        weight: ``[N, K]`` float32, bfloat16 or float16, contiguous, on the CPU.
        bias: ``[N]`` in the weight's dtype, or None.
        isa: an instruction set of `available_isas`, or None for the best.

    Returns:
        ``[M, N]`` in the weight's dtype. Products are summed in float32 and rounded once.

    Raises:
        ValueError: a shape or dtype above does not hold.
    """
    _check_dense("dense_linear", "weight", weight)
    if not weight.is_contiguous():
        raise ValueError(f"dense_linear: weight must be contiguous, got strides {weight.stride()}")
    _check_linear("dense_linear", x, bias, weight.shape[0], weight.shape[1], weight.dtype)
    y: Tensor = _ops.dense_linear(x, weight, bias, _isa_number(isa))
    return y


def measure_read_bandwidth(seconds: float = 2.0) -> float:
    """Measure how fast this machine reads memory, with torch's threads.

    Streams over 1 GiB, far more than any cache holds, until the time is over, and takes the fastest pass:
    anything else that the machine does only slows a pass down.

    Returns:
        Bytes per second.
    """
    buffer = torch.zeros(2**27, dtype=torch.int64)  # written, so that every page is real
    best = 0.0
    end = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        _ops.read_checksum(buffer)
        stop = time.perf_counter()
        best = max(best, buffer.numel() * buffer.element_size() / (stop - start))
        if stop >= end:
            return best


def _check_dense(op: str, name: str, dense: Tensor) -> None:
    if dense.dim() != 2:
        raise ValueError(f"{op}: {name} must be [N, K], got shape {tuple(dense.shape)}")
    if dense.dtype not in DTYPES:
        raise ValueError(f"{op}: {name} must be float32, bfloat16 or float16, got {dense.dtype}")
    if dense.device.type != "cpu":
        raise ValueError(f"{op}: {name} must be on the CPU, got {dense.device}")


def _check_linear(op: str, x: Tensor, bias: Tensor | None, N: int, K: int, dtype: torch.dtype) -> None:
    if x.dim() != 2 or x.shape[1] != K:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, but the weight has K={K}, so x must be [M, {K}]"
        )
    if x.dtype != dtype:
        raise ValueError(f"{op}: x is {x.dtype}, but the weight is {dtype}")
    if not x.is_contiguous():
        raise ValueError(f"{op}: x must be contiguous, got strides {x.stride()}")
    if bias is not None and (bias.shape != (N,) or bias.dtype != dtype):
        raise ValueError(f"{op}: bias must be [{N}] {dtype}, got shape {tuple(bias.shape)} {bias.dtype}")


# --- fake kernels: shapes and dtypes alone, for torch.compile ---------------------------------------------

_Fake = TypeVar("_Fake", bound=Callable[..., object])


def _register_fake(op: str) -> Callable[[_Fake], _Fake]:
    register: Callable[[_Fake], _Fake] = torch.library.register_fake(f"kernels_ext::{op}")
    return register


@_register_fake("read_checksum")
def _(buffer: Tensor) -> Tensor:
    return buffer.new_empty(())


@_register_fake("bitmap_pack")
def _(dense: Tensor, isa: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    N, K = dense.shape
    nnz = torch.library.get_ctx().new_dynamic_size()
    return (
        dense.new_empty((N, (K + 7) // 8), dtype=torch.uint8),
        dense.new_empty((nnz,)),
        dense.new_empty((N + 1,), dtype=torch.int64),
    )


@_register_fake("bitmap_pack_into")
def _(dense: Tensor, bitmap: Tensor, values: Tensor, row_offsets: Tensor, isa: int = 0) -> None:
    return None


@_register_fake("bitmap_row_counts")
def _(bitmap: Tensor) -> Tensor:
    return bitmap.new_empty((bitmap.shape[0],), dtype=torch.int64)


@_register_fake("bitmap_unpack_into")
def _(dense: Tensor, bitmap: Tensor, values: Tensor, row_offsets: Tensor, isa: int = 0) -> None:
    return None


@_register_fake("bitmap_linear")
def _(
    x: Tensor,
    bitmap: Tensor,
    values: Tensor,
    row_offsets: Tensor,
    bias: Tensor | None = None,
    isa: int = 0,
) -> Tensor:
    return x.new_empty((x.shape[0], bitmap.shape[0]))


@_register_fake("dense_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None, isa: int = 0) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
