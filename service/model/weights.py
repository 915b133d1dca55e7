"""From a checkpoint to layers: which tensors make a layer, and reading them into their final form.

Peak memory is the model as stored plus one dense layer: each layer is read, packed and its dense form dropped
before the next one is touched, and a layer that is packed on disk is read straight into place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_ext import BitmapWeight
from service.errors import CheckpointError

from .arena import WeightArena
from .checkpoint import Checkpoint, Entry, PackedEntry
from .interface import LayerReport
from .linear import SparseLinear, choose_format, describe, pack

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Which tensors make one linear layer.

    Attributes:
        name: the layer's name in reports; a fused layer's is the parent module's and e.g. ``qkv_proj``.
        sources: ``(tensor name, rows)``; the layer's rows are theirs, in this order.
        K: in features.
        biases: one name for each source, or none.
        transposed: the tensors are stored ``[K, rows]`` (GPT-2's Conv1D).
    """

    name: str
    sources: tuple[tuple[str, int], ...]
    K: int
    biases: tuple[str, ...] = ()
    transposed: bool = False

    @property
    def N(self) -> int:
        """Out features."""
        return sum(rows for _, rows in self.sources)


def drop_negative_zeros(dense: Tensor) -> int:
    """Turn each -0.0 into +0.0, in place; returns how many there were.

    Pruning by a mask leaves -0.0 where a weight was negative. The packer stores whatever has a bit set, so
    they would take as much as weights. Every other value keeps its bits, NaN payloads included.
    """
    negative = (dense == 0).logical_and_(torch.signbit(dense))
    count = int(torch.count_nonzero(negative))
    if count:
        dense.masked_fill_(negative, 0.0)
    return count


class WeightReader:
    """Reads layers of an open checkpoint in the dtype that is served, and keeps account of what was read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weights: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        """``weights`` is "auto" or "dense"; ``progress`` is told a stage and the share of bytes read."""
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.weights = weights
        self._progress = progress
        self._total = max(1, sum(checkpoint.nbytes(entry) for entry in checkpoint.entries.values()))
        self._done = 0
        self._used: set[str] = set()
        # Where dense layers are read before they are packed. One buffer for all of them: a new one each time
        # would leave holes of its size between the packed layers, and peak memory would be far above the sum.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._arena = WeightArena() if device.type == "cpu" else None

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor dense; raises CheckpointError where it is missing or not of this shape."""
        entry = self.checkpoint.find(name, shape)
        out = self._empty(shape, dtype or self.dtype)
        self.checkpoint.read_into(entry, out)
        self.mark_used(name)
        return out.to(self.device)

    def linear(self, plan: LinearPlan, dtype: torch.dtype | None = None) -> SparseLinear:
        """Read one layer and store it as it is smallest and fastest.

        Raises:
            CheckpointError: a tensor of the plan is missing or inconsistent.
        """
        dtype = dtype or self.dtype
        entries = self._entries(plan)
        N, K = plan.N, plan.K
        bias = self._bias(plan, dtype)
        layer = None
        if not plan.transposed and all(isinstance(entry, PackedEntry) for entry in entries):
            packed = [entry for entry in entries if isinstance(entry, PackedEntry)]
            nnz = sum(entry.nnz for entry in packed)
            stored = choose_format(N, K, dtype, nnz, device=self.device.type, weights=self.weights)
            if stored.name != "dense":
                compressed = pack(self._read_packed(packed, N, K, dtype), stored)
                layer = SparseLinear(plan.name, compressed, bias, stored)
        if layer is None and self.weights == "dense":
            dense = self._empty((N, K), dtype)
            self._read_dense(plan, entries, dense)
            layer = self.place(plan.name, dense, bias)
        if layer is None:
            dense = self._scratch_matrix(N, K, dtype)
            self._read_dense(plan, entries, dense)
            layer = self.place(plan.name, dense, bias, shared=True)
        for name, _ in plan.sources:
            self.mark_used(name)
        return layer

    def place(self, name: str, dense: Tensor, bias: Tensor | None, *, shared: bool = False) -> SparseLinear:
        """Store a dense ``[N, K]`` weight as it is smallest and fastest.

        Args:
            name, dense, bias: the layer. ``dense`` is changed or kept: the caller gives it away.
            shared: the caller will overwrite ``dense``, so a layer that stays dense must copy it.
        """
        N, K = dense.shape
        nnz = int(torch.count_nonzero(dense))
        stored = choose_format(N, K, dense.dtype, nnz, device=self.device.type, weights=self.weights)
        if stored.name != "dense":
            drop_negative_zeros(dense)
            room = self._empty_bitmap(N, K, nnz, dense.dtype) if stored.name == "bitmap" else None
            return SparseLinear(name, pack(dense.to(self.device), stored, room), bias, stored)
        if shared and self._arena is not None:
            dense = self._empty((N, K), dense.dtype).copy_(dense)
            shared = False
        return SparseLinear(name, dense.to(self.device, copy=shared), bias, stored, nnz)

    def inspect(self, plan: LinearPlan) -> LayerReport:
        """Report on a layer as `linear` would store it, without keeping it."""
        entries = self._entries(plan)
        nnz = self._count_stored(plan, entries)
        stored = choose_format(plan.N, plan.K, self.dtype, nnz, device=self.device.type, weights=self.weights)
        for name, _ in plan.sources:
            self.mark_used(name)
        for name, (_, rows) in zip(plan.biases, plan.sources, strict=bool(plan.biases)):
            self.checkpoint.find(name, (rows,))
            self.mark_used(name)
        return describe(plan.name, plan.N, plan.K, self.dtype, nnz, stored, device=self.device.type)

    def count_nonzero(self, entry: Entry) -> int:
        """Non-zeros of a stored tensor once it is in the served dtype; also checks a packed entry whole."""
        return sum(int(torch.count_nonzero(rows)) for _, rows in self.checkpoint.rows(entry, self.dtype))

    def _count_stored(self, plan: LinearPlan, entries: list[Entry]) -> int:
        """What `linear` would count: stored values where all is packed, else non-zeros."""
        found = [self.count_nonzero(entry) for entry in entries]
        packed = [entry.nnz for entry in entries if isinstance(entry, PackedEntry)]
        return sum(found) if plan.transposed or len(packed) < len(entries) else sum(packed)

    def mark_used(self, name: str) -> None:
        """Note that a tensor has been read."""
        if name in self._used:
            return
        self._used.add(name)
        self._done += self.checkpoint.nbytes(self.checkpoint.entries[name])
        if self._progress is not None:
            self._progress("reading weights", self._done / self._total)

    def check_all_used(self, ignored: Iterable[str] = ()) -> None:
        """Hold the checkpoint to the model: a tensor that no layer wanted is an error.

        Args:
            ignored: regular expressions of names that are known to be of no use.

        Raises:
            CheckpointError: tensors are left over; a wrong config or another model's file.
        """
        patterns = [re.compile(pattern) for pattern in ignored]
        left = [
            name
            for name in self.checkpoint.entries
            if name not in self._used and not any(pattern.search(name) for pattern in patterns)
        ]
        if left:
            first = self.checkpoint.entries[left[0]]
            raise CheckpointError(
                f"{first.file}: tensor {left[0]}: expected only tensors of the model that "
                f"{self.checkpoint.config_file.name} describes, found {len(left)} unknown ones "
                f"({', '.join(left[:5])}{', ...' if len(left) > 5 else ''}). "
                "The configuration may belong to another model."
            )

    def _entries(self, plan: LinearPlan) -> list[Entry]:
        find, K = self.checkpoint.find, plan.K
        return [find(name, (K, rows) if plan.transposed else (rows, K)) for name, rows in plan.sources]

    def _bias(self, plan: LinearPlan, dtype: torch.dtype) -> Tensor | None:
        if not plan.biases:
            return None
        pairs = zip(plan.biases, plan.sources, strict=True)
        return torch.cat([self.tensor(name, (rows,), dtype) for name, (_, rows) in pairs])

    def _read_dense(self, plan: LinearPlan, entries: list[Entry], out: Tensor) -> None:
        start = 0
        for entry, (_, rows) in zip(entries, plan.sources, strict=True):
            part = out[start : start + rows]
            if plan.transposed:
                for first, block in self.checkpoint.rows(entry, out.dtype):
                    part[:, first : first + block.shape[0]] = block.T
            else:
                self.checkpoint.read_into(entry, part)
            start += rows

    def _scratch_matrix(self, N: int, K: int, dtype: torch.dtype) -> Tensor:
        nbytes = N * K * dtype.itemsize
        if self._scratch.numel() < nbytes:
            # The old buffer goes first, so that both never exist at once.
            self._scratch = torch.empty(0, dtype=torch.uint8)
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(dtype).view(N, K)

    def _read_packed(self, entries: list[PackedEntry], N: int, K: int, dtype: torch.dtype) -> BitmapWeight:
        """Concatenate packed matrices by rows: their bitmaps and values simply follow one another."""
        weight = self._empty_bitmap(N, K, sum(entry.nnz for entry in entries), dtype)
        bitmap, values, row_offsets = weight.bitmap, weight.values, weight.row_offsets
        row_offsets[0] = 0
        row = value = 0
        for entry in entries:
            rows = entry.shape[0]
            counts = self.checkpoint.read_packed_into(
                entry, bitmap[row : row + rows], values[value : value + entry.nnz]
            )
            row_offsets[row + 1 : row + rows + 1] = counts
            row += rows
            value += entry.nnz
        torch.cumsum(row_offsets, 0, out=row_offsets)
        return BitmapWeight(
            N=N,
            K=K,
            bitmap=bitmap.to(self.device),
            values=values.to(self.device),
            row_offsets=row_offsets.to(self.device),
        )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for a weight in main memory: where it stays if that is the device."""
        return torch.empty(shape, dtype=dtype) if self._arena is None else self._arena.empty(shape, dtype)

    def _empty_bitmap(self, N: int, K: int, nnz: int, dtype: torch.dtype) -> BitmapWeight:
        return BitmapWeight(
            N=N,
            K=K,
            bitmap=self._empty((N, -(-K // 8)), torch.uint8),
            values=self._empty((nnz,), dtype),
            row_offsets=self._empty((N + 1,), torch.int64),
        )
