"""Positions and paged attention: rotary tables, the cache, and attention for transformers' modelling code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels_ext import decoder_ops

from .interface import ForwardBatch, KvCache, ModelSpec

# Rope types whose frequencies do not depend on how long the sequence is, so that one table serves all.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

# The name under which transformers finds our attention.
PAGED_ATTENTION = "lacunar_paged"

# Arguments of transformers' attention interface that change the result in a way that is not implemented here.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "alibi", "sinks")


def rope_tables(config: Any, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, float32 ``[length, head_dim]``, halves repeated.

    Args:
        config: a transformers configuration whose ``rope_parameters`` has a static rope type.
        head_dim: of queries and keys; even.
        length: positions 0..length-1.
        device: where the tables go.

    Source: transformers' own functions compute the frequencies, so that every scaling rule is theirs.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
        scale = 1.0
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(length, dtype=torch.float)[:, None] * inverse.to(torch.float)
    cos, sin = (table.mul_(scale).repeat(1, 2) for table in (angles.cos(), angles.sin()))
    return cos.to(device), sin.to(device)


def allocate_kv_cache(spec: ModelSpec, num_blocks: int, block_size: int) -> KvCache:
    """Make an empty paged cache, uninitialised: the system commits a page when it is first written."""
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    return KvCache(
        keys=[torch.empty(shape, dtype=spec.dtype, device=spec.device) for _ in range(spec.num_layers)],
        values=[torch.empty(shape, dtype=spec.dtype, device=spec.device) for _ in range(spec.num_layers)],
        block_size=block_size,
    )


def kv_bytes_per_block(spec: ModelSpec, block_size: int) -> int:
    """Bytes that one block of the paged cache takes over all layers."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize


@dataclass
class PagedStep:
    """What the attention of transformers' modelling code needs to know of the step that is running.

    Attributes:
        batch, cache: the step's tokens and where their keys and values go.
        windows: filled while running: the sliding window that each layer asked for.
    """

    batch: ForwardBatch
    cache: KvCache
    windows: dict[int, int | None] = field(default_factory=dict)


# The running step. Modelling code passes attention only what it knows itself, and not all of it passes
# further keyword arguments down; one engine process runs one step at a time.
_running: PagedStep | None = None


@contextlib.contextmanager
def running_step(step: PagedStep) -> Iterator[PagedStep]:
    """Make a step the one that attention works on, for the duration of a ``with`` block."""
    global _running
    _running = step
    try:
        yield step
    finally:
        _running = None


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: write this step's keys and values to the paged cache, attend to it.

    Args:
        module: the attention module; ``layer_idx`` says which layer's cache to use.
        query: ``[1, heads, T, head_dim]``, positions already applied.
        key, value: ``[1, kv_heads, T, head_dim]``.
        attention_mask: must be None; causality and sequence borders come from the running step.
        scaling: factor on the scores; None means ``head_dim ** -0.5``.
        sliding_window: how many tokens a token sees, itself included; None for all.
        kwargs: anything else that transformers passes.

    Returns:
        ``[1, T, heads, head_dim]`` and None in place of attention weights.

    Raises:
        ValueError: the architecture wants attention of a kind that the paged kernel does not compute.
    """
    step = _running
    if step is None:
        raise RuntimeError("paged attention was called outside of a step")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(step.cache.keys):
        raise ValueError(
            f"{type(module).__name__} has layer_idx {layer!r}, which is none of the cached layers"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} (layer {layer}) wants {name}, which paged attention lacks"
            )
    if (
        attention_mask is not None
        or kwargs.get("is_causal") is False
        or getattr(module, "is_causal", True) is False
    ):
        raise ValueError(f"{type(module).__name__} (layer {layer}) is not plain causal attention")
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    heads, head_dim = keys.shape[2:]
    for what, tensor in (("keys", key), ("values", value)):
        if tensor.shape[1] != heads or tensor.shape[3] != head_dim:
            raise ValueError(
                f"{type(module).__name__} (layer {layer}) makes {what} of {tensor.shape[1]} heads of "
                f"{tensor.shape[3]}, but the configuration says {heads} of {head_dim}"
            )
    batch = step.batch
    tokens = query.shape[2]
    keys.view(-1, heads, head_dim).index_copy_(0, batch.slot_mapping, key[0].transpose(0, 1))
    values.view(-1, heads, head_dim).index_copy_(0, batch.slot_mapping, value[0].transpose(0, 1))
    step.windows[layer] = sliding_window
    out: Tensor = decoder_ops.paged_attention(
        query[0].transpose(0, 1).contiguous(),
        keys,
        values,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        head_dim**-0.5 if scaling is None else scaling,
        sliding_window,
    )
    return out.view(1, tokens, query.shape[1], head_dim), None


def register() -> None:
    """Make our attention known to transformers; doing it again changes nothing."""
    AttentionInterface.register(PAGED_ATTENTION, paged_attention_forward)
