"""The decoder ops' definitions in float64, and batches whose every unread place is poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kernels_ext import decoder_ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of float32 sums of a few hundred terms of order 1, and of one rounding to the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=rng).to(dtype)


def assert_close(got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    """Within `factor` roundings of the dtype of `got`, relative to values of order 1 and above."""
    allowed = factor * TOLERANCE[got.dtype] * (1 + want.abs())
    wrong = (got.double() - want).abs() > allowed
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {got.numel()} wrong; first at {wrong.nonzero()[0].tolist()}: "
        f"{got[wrong][0].item()}, want {want[wrong][0].item()}"
    )


def llama_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In transformers' order: normalise in float32, round to the dtype, multiply by the weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def angles(positions: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin as transformers' rotary embeddings compute them: both halves hold the same angles."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angle = torch.arange(positions)[:, None] * frequencies
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` in float64 on the first R elements; x [T, heads, D], cos [T, R]."""
    R = cos.shape[-1]
    head = x[..., :R].double()
    half = torch.cat([-head[..., R // 2 :], head[..., : R // 2]], dim=-1)
    rotated = head * cos[:, None].double() + half * sin[:, None].double()
    return torch.cat([rotated, x[..., R:].double()], dim=-1)


@dataclass
class Batch:
    """Sequences in a paged cache. Everything that the op must not read holds NaN or an impossible index."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    window: int | None

    @staticmethod
    def make(
        rng: torch.Generator,
        queries: list[int],
        contexts: list[int],
        *,
        Hq: int = 6,
        Hkv: int = 2,
        D: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        spare_blocks: int = 3,
    ) -> Batch:
        S = len(queries)
        counts = [-(-c // block_size) for c in contexts]
        blocks = sum(counts) + spare_blocks
        k_cache = torch.full((blocks, block_size, Hkv, D), math.nan, dtype=dtype)
        v_cache = torch.full((blocks, block_size, Hkv, D), math.nan, dtype=dtype)
        block_tables = torch.full((S, max(counts, default=0) + 2), -(2**31), dtype=torch.int32)
        free = torch.randperm(blocks, generator=rng).tolist()
        for s, (n, c) in enumerate(zip(queries, contexts, strict=True)):
            first = 0 if window is None else max(0, c - n - window + 1)
            used = range(first // block_size, counts[s])
            block_tables[s, used.start : used.stop] = torch.tensor([free.pop() for _ in used]).int()
            seen = torch.arange(first, c)
            rows = block_tables[s, seen // block_size].long(), seen % block_size
            k_cache[rows] = normal(rng, len(seen), Hkv, D, dtype=dtype)
            v_cache[rows] = normal(rng, len(seen), Hkv, D, dtype=dtype)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        q = normal(rng, sum(queries), Hq, D, dtype=dtype)
        lens = torch.tensor(contexts, dtype=torch.int32)
        return Batch(q, k_cache, v_cache, block_tables, starts, lens, window)

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def run(self, isa: str | None = None) -> Tensor:
        return decoder_ops.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start,
            self.context_lens,
            self.scale,
            self.window,
            isa=isa,
        )

    def only(self, s: int, first: int = 0, last: int | None = None) -> Batch:
        """Query tokens [first, last) of sequence s as a batch of their own."""
        start, end = int(self.query_start[s]), int(self.query_start[s + 1])
        n = end - start
        last = n if last is None else last
        return Batch(
            self.q[start + first : start + last].contiguous(),
            self.k_cache,
            self.v_cache,
            self.block_tables[s : s + 1].contiguous(),
            torch.tensor([0, last - first], dtype=torch.int32),
            self.context_lens[s : s + 1] - (n - last),
            self.window,
        )

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "window"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def reference(self) -> Tensor:
        """The definition, in float64, one sequence at a time."""
        block_size, group = self.k_cache.shape[1], self.q.shape[1] // self.k_cache.shape[2]
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for s, context in enumerate(self.context_lens.tolist()):
            start, end = self.query_start[s : s + 2].tolist()
            if start == end:
                continue
            positions = torch.arange(context - (end - start), context)
            window = context if self.window is None else self.window
            seen = torch.arange(max(0, context - (end - start) - window + 1), context)
            rows = self.block_tables[s, seen // block_size].long(), seen % block_size
            keys = self.k_cache[rows].double().repeat_interleave(group, dim=1)
            values = self.v_cache[rows].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("thd,jhd->htj", self.q[start:end].double(), keys) * self.scale
            distance = positions[:, None] - seen
            scores.masked_fill_((distance < 0) | (distance >= window), -math.inf)
            out[start:end] = torch.einsum("htj,jhd->thd", scores.softmax(-1), values)
        return out.flatten(1)
