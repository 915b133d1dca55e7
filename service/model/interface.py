"""What the engine asks of a model, whichever code runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes the engine needs. `window` is the sliding attention window in tokens, or None."""

    architecture: str
    implementation: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One linear layer as stored; `backends` maps an M bucket ("1", "2-4", ...) to the backend there."""

    name: str
    N: int
    K: int
    dtype: str
    format: str
    sparsity: float
    dense_bytes: int
    stored_bytes: int
    backends: dict[str, str]
    reason: str


@dataclass
class KvCache:
    """Paged keys and values: per layer two tensors ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    Slot ``s`` of a sequence lives in block ``block_table[s // block_size]`` at row ``s % block_size``.
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int

    @property
    def num_blocks(self) -> int:
        """How many blocks every layer holds."""
        return int(self.keys[0].shape[0])


@dataclass
class ForwardBatch:
    """One step's tokens of all sequences, flattened: T tokens of S sequences.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64, position of each token in its sequence.
        slot_mapping: ``[T]`` int64, ``block * block_size + row`` where the token's K and V go.
        query_start: ``[S + 1]`` int32, sequence s owns tokens ``query_start[s]:query_start[s+1]``.
        context_lens: ``[S]`` int32, tokens of the sequence in the cache after this step.
        block_tables: ``[S, max_blocks]`` int32; entries past a sequence's blocks are 0 and never read.
        logits_indices: ``[L]`` int64, the tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    logits_indices: Tensor


class CausalModel(Protocol):
    """A loaded model. Not thread-safe; one engine process drives it."""

    spec: ModelSpec

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Make an empty cache on the model's device, in the model's dtype."""
        ...

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block takes over all layers."""
        ...

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Run one step and write its keys and values; returns logits ``[L, vocab_size]`` float32."""
        ...

    def layer_reports(self) -> Iterable[LayerReport]:
        """Describe every linear layer, in the model's order."""
        ...

    def linear_calls(self) -> dict[str, int]:
        """Calls since load by "backend|m_bucket"."""
        ...


@runtime_checkable
class CapturableModel(CausalModel, Protocol):
    """A model whose decode step may be captured in a CUDA graph: on the device it waits for nothing."""

    def count_step(self, tokens: int) -> None:
        """Count a replayed step of that many tokens, all of whose logits are wanted, as `forward` counts."""
        ...
