"""Turns a step's plan into tensors and runs the model on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.errors import SettingsError
from service.model.interface import CapturableModel, CausalModel, ForwardBatch

from .config import EngineConfig
from .decode_graphs import DecodeGraphs, LargestTokens
from .resources import available_memory_bytes
from .scheduler import Chunk, StepPlan

_log = logging.getLogger("lacunar.engine")

# Share of the available memory that the KV cache may take on a CPU when the configuration names no size: the
# rest of the machine is not ours.
_CPU_SHARE = 0.25


@dataclass(slots=True)
class StepLogits:
    """Logits of one step, and whose they are.

    Attributes:
        logits: ``[L, vocab_size]`` float32.
        sample_rows: per chunk of the plan, its row to sample from, or -1.
        prompt_rows: per chunk that has any, (index of the chunk, first row, rows): row r of them predicts
            the prompt's token ``start + 1 + r``.
    """

    logits: Tensor
    sample_rows: list[int]
    prompt_rows: list[tuple[int, int, int]]


class ModelRunner:
    """Owns the KV cache and the staging buffers, which are filled in place each step.

    Args:
        model: the loaded model.
        config: the engine's configuration.
        progress: told the share of the warm-up that is done (0..1).

    Raises:
        SettingsError: the KV cache would not hold a single block.
    """

    def __init__(
        self, model: CausalModel, config: EngineConfig, progress: Callable[[float], None] = lambda _: None
    ) -> None:
        self.model = model
        self.block_size = config.kv_block_size
        self.device = model.spec.device
        max_tokens, max_sequences = config.max_step_tokens, config.max_num_sequences
        max_blocks = -(-model.spec.max_model_len // self.block_size)
        pinned = self.device.type == "cuda"
        self._token_ids = _Staging((max_tokens,), torch.int64, pinned)
        self._positions = _Staging((max_tokens,), torch.int64, pinned)
        self._slots = _Staging((max_tokens,), torch.int64, pinned)
        self._logits_indices = _Staging((max_tokens,), torch.int64, pinned)
        self._query_start = _Staging((max_sequences + 1,), torch.int32, pinned)
        self._context_lens = _Staging((max_sequences,), torch.int32, pinned)
        # One row of the table after the other, as wide as the step's longest sequence: a view of the front of
        # this.
        self._block_tables = _Staging((max_sequences * max_blocks,), torch.int32, pinned)
        self._arange = np.arange(max(max_tokens, 1), dtype=np.int64)

        # Whether the copies to the device, which read the buffers in their own time, are through.
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

        self._warm_up(min(max_tokens, model.spec.max_model_len) if pinned else 1)
        self.num_blocks = self._count_blocks(config, max_blocks)
        self._graphs: DecodeGraphs | None = None
        if not (config.cuda_graphs and self.device.type == "cuda"):
            self.kv_cache = model.allocate_kv_cache(self.num_blocks, self.block_size)
        elif not isinstance(model, CapturableModel):
            _log.info(
                "%s decodes without CUDA graphs: transformers' code may wait for the device",
                model.spec.architecture,
            )
            self.kv_cache = model.allocate_kv_cache(self.num_blocks, self.block_size)
        else:
            # One block more than anybody may use, for the rows that pad a captured step.
            self.kv_cache = model.allocate_kv_cache(self.num_blocks + 1, self.block_size)
            self._graphs = DecodeGraphs(
                model,
                self.kv_cache,
                max_sequences=max_sequences,
                max_blocks=max_blocks,
                scratch_block=self.num_blocks,
                progress=progress,
            )

    def run(self, plan: StepPlan) -> StepLogits:
        """Compute a plan's chunks and write their keys and values into their blocks."""
        if self._graphs is not None and plan.phase == "decode" and all(c.decodes for c in plan.chunks):
            return StepLogits(self._graphs.run(plan.chunks), list(range(len(plan.chunks))), [])
        batch, sample_rows, prompt_rows = self._build(plan.chunks)
        return StepLogits(self.model.forward(batch, self.kv_cache), sample_rows, prompt_rows)

    @property
    def can_launch(self) -> bool:
        """Whether steps of chunks that all decode can be launched without waiting for them."""
        return self._graphs is not None

    def launch(self, plan: StepPlan, sources: list[int] | None = None) -> LargestTokens:
        """Start a plan of chunks that all decode; see DecodeGraphs.launch."""
        assert self._graphs is not None
        return self._graphs.launch(plan.chunks, sources)

    def probe(self, block: int) -> None:
        """Run one token into a block that no sequence uses: raises if the model or its device is broken."""
        self.model.forward(self._single_sequence(1, [block]), self.kv_cache)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _warm_up(self, tokens: int) -> None:
        """Run once before the KV cache is sized, so that the memory which the model works in is counted as
        used."""
        blocks = list(range(-(-tokens // self.block_size)))
        cache = self.model.allocate_kv_cache(len(blocks), self.block_size)
        self.model.forward(self._single_sequence(tokens, blocks), cache)

    def _count_blocks(self, config: EngineConfig, max_blocks: int) -> int:
        block_bytes = self.model.kv_bytes_per_block(self.block_size)
        if config.kv_cache_bytes is not None:
            size = config.kv_cache_bytes
        elif self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            size = free - int(total * (1 - config.gpu_memory_utilization))
        else:
            wanted = config.max_num_sequences * max_blocks * block_bytes
            size = min(wanted, int(available_memory_bytes() * _CPU_SHARE))
        if size < block_bytes:
            raise SettingsError(
                f"the KV cache may take {size} bytes, but one block of {self.block_size} tokens takes "
                f"{block_bytes}: raise kv_cache_bytes, or free memory on the device",
                param="kv_cache_bytes",
            )
        return size // block_bytes

    def _single_sequence(self, tokens: int, blocks: list[int]) -> ForwardBatch:
        self._wait_for_copies()
        positions = self._arange[:tokens]
        table = np.array(blocks, dtype=np.int64)
        self._token_ids.array[:tokens] = 0
        self._positions.array[:tokens] = positions
        self._slots.array[:tokens] = table[positions // self.block_size] * self.block_size + (
            positions % self.block_size
        )
        self._query_start.array[:2] = (0, tokens)
        self._context_lens.array[0] = tokens
        self._block_tables.array[: len(blocks)] = blocks
        self._logits_indices.array[0] = tokens - 1
        return self._batch(tokens, 1, len(blocks), 1)

    def _build(self, chunks: list[Chunk]) -> tuple[ForwardBatch, list[int], list[tuple[int, int, int]]]:
        self._wait_for_copies()
        token_ids, positions, slots = self._token_ids.array, self._positions.array, self._slots.array
        query_start, context_lens = self._query_start.array, self._context_lens.array
        logits_indices = self._logits_indices.array
        width = max(chunk.sequence.num_blocks for chunk in chunks)
        tables = self._block_tables.array[: len(chunks) * width].reshape(len(chunks), width)
        size = self.block_size
        sample_rows: list[int] = []
        prompt_rows: list[tuple[int, int, int]] = []
        at = rows = 0
        query_start[0] = 0
        for index, chunk in enumerate(chunks):
            sequence, start, length = chunk.sequence, chunk.start, chunk.length
            if length == 1:
                token_ids[at] = sequence.tokens[start]
                positions[at] = start
                slots[at] = int(sequence.blocks[start // size]) * size + start % size
            else:
                end = at + length
                token_ids[at:end] = sequence.tokens[start : chunk.end]
                places = positions[at:end]
                np.add(self._arange[:length], start, out=places)
                slots[at:end] = sequence.blocks[places // size].astype(np.int64) * size + places % size
            tables[index, : sequence.num_blocks] = sequence.blocks[: sequence.num_blocks]
            tables[index, sequence.num_blocks :] = 0
            query_start[index + 1] = at + length
            context_lens[index] = chunk.end

            gathered = sequence.prompt_logprobs
            if gathered is not None and len(gathered) < sequence.prompt_length:
                # Prompt positions never outrun what is gathered: such a sequence starts at 0 and is never
                # cached, and after a preemption what was gathered is computed again without asking for
                # logits.
                first = max(start, len(gathered) - 1)
                count = min(chunk.end, sequence.prompt_length - 1) - first
                if count > 0:
                    logits_indices[rows : rows + count] = self._arange[:count] + (at + first - start)
                    prompt_rows.append((index, rows, count))
                    rows += count
            if chunk.completes and sequence.sampling.max_tokens > 0:
                logits_indices[rows] = at + length - 1
                sample_rows.append(rows)
                rows += 1
            else:
                sample_rows.append(-1)
            at += length
        return self._batch(at, len(chunks), width, rows), sample_rows, prompt_rows

    def _batch(self, tokens: int, sequences: int, width: int, rows: int) -> ForwardBatch:
        device = self.device
        batch = ForwardBatch(
            token_ids=self._token_ids.front(tokens, device),
            positions=self._positions.front(tokens, device),
            slot_mapping=self._slots.front(tokens, device),
            query_start=self._query_start.front(sequences + 1, device),
            context_lens=self._context_lens.front(sequences, device),
            block_tables=self._block_tables.front(sequences * width, device).view(sequences, width),
            logits_indices=self._logits_indices.front(rows, device),
        )
        if self._copied is not None:
            self._copied.record()
        return batch

    def _wait_for_copies(self) -> None:
        """Fill no buffer before the device has read it: a step that samples nothing does not wait for it."""
        if self._copied is not None:
            self._copied.synchronize()


class _Staging:
    """A tensor in host memory and the numpy array that writes it: filling it costs no conversion."""

    __slots__ = ("_tensor", "array")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> None:
        self._tensor = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.array: NDArray[np.signedinteger] = self._tensor.numpy()

    def front(self, count: int, device: torch.device) -> Tensor:
        """The first `count` elements on the device. On a CPU that is this memory, valid until the next
        step."""
        return self._tensor[:count].to(device, non_blocking=True)
