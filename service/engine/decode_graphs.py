"""CUDA graphs of decode steps: one captured step for each of a few batch sizes, replayed with other contents.

A decode step of a large model is some two hundred launches of a few microseconds each. Launched one by one
from Python they cost more than they compute; a graph replays them in one call and lets each overlap the next.

A graph also chooses each row's largest logit, and the next graph can take its tokens from there: so a step of
greedy sequences is launched while the one before it still runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.model.interface import CapturableModel, ForwardBatch, KvCache

from .scheduler import Chunk

_log = logging.getLogger("lacunar.engine")

# Rows are padded up to the next of these: few enough to capture at start, close enough to waste little.
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_INT64_ROWS = 4  # token ids, positions, slots, sources

# In the row of sources: the token id is in the row of token ids. Otherwise it is what this row of the step
# before chose.
_KNOWN = -1


class DecodeGraphs:
    """Captured decode steps for up to `max_sequences` sequences.

    Rows that pad a step belong to no sequence: they compute one token in the scratch block, which no sequence
    owns, and nobody reads their logits.

    Args:
        model: on a CUDA device.
        kv_cache: the cache that the steps read and write.
        max_sequences: the largest batch.
        max_blocks: blocks of the longest sequence.
        scratch_block: a block of the cache that no sequence will ever own.
        progress: told the share of graphs that are captured (0..1).
    """

    def __init__(
        self,
        model: CapturableModel,
        kv_cache: KvCache,
        *,
        max_sequences: int,
        max_blocks: int,
        scratch_block: int,
        progress: Callable[[float], None],
    ) -> None:
        started, device = time.monotonic(), model.spec.device
        free_before = torch.cuda.mem_get_info(device)[0]
        sizes = [size for size in _BATCH_SIZES if size < max_sequences] + [max_sequences]
        self._chosen = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        # One is read while the next step writes the other.
        self._on_host = [torch.zeros(max_sequences, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._steps: dict[int, _CapturedStep] = {}
        pool = None
        # The largest first: the smaller ones then find all their memory in its pool.
        for done, size in enumerate(reversed(sizes), start=1):
            step = _CapturedStep(model, kv_cache, size, max_blocks, scratch_block, self._chosen, pool)
            pool = step.pool
            self._steps[size] = step
            progress(done / len(sizes))
        self._by_batch = [
            min(size for size in sizes if size >= max(batch, 1)) for batch in range(max_sequences + 1)
        ]
        used = free_before - torch.cuda.mem_get_info(device)[0]
        _log.info(
            "captured decode steps for %s sequences in %.1f s, %d MiB",
            ", ".join(map(str, sizes)),
            time.monotonic() - started,
            used >> 20,
        )

    def run(self, chunks: list[Chunk]) -> Tensor:
        """Run a step of chunks that all decode.

        Returns:
            Their logits ``[len(chunks), vocab_size]`` float32, valid until the next step.
        """
        return self._steps[self._by_batch[len(chunks)]].run(chunks, [_KNOWN] * len(chunks))

    def launch(self, chunks: list[Chunk], sources: list[int] | None = None) -> LargestTokens:
        """Start a step of chunks that all decode, and do not wait for it.

        Args:
            chunks: what to compute.
            sources: per chunk, the row of the step launched last that chooses its token; None where all
                tokens are known.

        Returns:
            The token of each chunk's largest logit. Two of these can be open at once.
        """
        self._steps[self._by_batch[len(chunks)]].run(chunks, sources or [_KNOWN] * len(chunks))
        host = self._on_host.pop(0)
        self._on_host.append(host)
        host[: len(chunks)].copy_(self._chosen[: len(chunks)], non_blocking=True)
        return LargestTokens(host[: len(chunks)])


class LargestTokens:
    """The tokens that a launched step will have chosen."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def wait(self) -> list[int]:
        """Each row's token, -1 where the row's logits are not finite."""
        self._copied.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class _CapturedStep:
    """One graph, and the inputs that it reads: a single buffer on the host, copied in one go."""

    def __init__(
        self,
        model: CapturableModel,
        kv_cache: KvCache,
        size: int,
        max_blocks: int,
        scratch_block: int,
        chosen: Tensor,
        pool: Any,
    ) -> None:
        device = model.spec.device
        self._model = model
        self._block_size = kv_cache.block_size
        self._scratch_block = scratch_block
        int32_rows = 1 + max_blocks  # context lengths, block tables
        total = size * (_INT64_ROWS * 8 + int32_rows * 4)
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        wide, narrow = _split(self._host, size)
        self._token_ids, self._positions, self._slots, self._sources = (rows.numpy() for rows in wide)
        self._context_lens = narrow[:size].numpy()
        self._block_tables = narrow[size:].view(size, max_blocks).numpy()
        self._size = size
        self._pad(0)

        wide, narrow = _split(self._device, size)
        # Kept for as long as the graph: it holds addresses, not tensors.
        self._batch = batch = ForwardBatch(
            token_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2],
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=narrow[:size],
            block_tables=narrow[size:].view(size, max_blocks),
            logits_indices=torch.arange(size, device=device),
        )
        self._sources_on_device = sources = wide[3]

        def step() -> Tensor:
            # A row that was not finite has chosen -1; its sequence ends, but may be computed once more.
            fed = chosen[sources.clamp(min=0)].clamp_(min=0)
            token_ids = torch.where(sources == _KNOWN, batch.token_ids, fed)
            logits = model.forward(replace(batch, token_ids=token_ids), kv_cache)
            peaks, largest = logits.max(dim=-1)
            chosen[:size] = torch.where(torch.isfinite(peaks), largest, -1)
            return logits

        self._device.copy_(self._host)
        # Once before capturing: libraries allocate what they need on their first call.
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = step()
        self.pool: Any = self._graph.pool()

    def run(self, chunks: list[Chunk], sources: list[int]) -> Tensor:
        self._copied.synchronize()
        size = self._block_size
        for row, chunk in enumerate(chunks):
            sequence, start = chunk.sequence, chunk.start
            self._token_ids[row] = sequence.tokens[start] if sources[row] == _KNOWN else 0
            self._positions[row] = start
            self._slots[row] = int(sequence.blocks[start // size]) * size + start % size
            self._context_lens[row] = start + 1
            self._block_tables[row, : sequence.num_blocks] = sequence.blocks[: sequence.num_blocks]
        self._sources[: len(chunks)] = sources
        self._pad(len(chunks))
        self._device.copy_(self._host, non_blocking=True)
        self._copied.record()
        self._graph.replay()
        self._model.count_step(self._size)
        return self._logits[: len(chunks)]

    def _pad(self, first: int) -> None:
        """Point the rows from `first` on to the scratch block."""
        self._token_ids[first:] = 0
        self._positions[first:] = 0
        self._sources[first:] = _KNOWN
        self._slots[first:] = (
            self._scratch_block * self._block_size + np.arange(self._size - first) % self._block_size
        )
        self._context_lens[first:] = 1
        self._block_tables[first:, 0] = self._scratch_block


def _split(buffer: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The int64 rows ``[3, size]`` at the front of a byte buffer, and the int32 numbers behind them."""
    front = _INT64_ROWS * size * 8
    return buffer[:front].view(torch.int64).view(_INT64_ROWS, size), buffer[front:].view(torch.int32)
