"""The ops around the linears of a decoder step: norms, rotary embedding, paged attention, gated activation.

Tensors are float32, bfloat16 or float16, all of one call in the same dtype; arithmetic inside is float32,
rounded where the formulas below say ``round``. Every tensor must be contiguous and on one device. The
compiled ops check shapes, dtypes, layout and, on the CPU, every index, and raise ValueError; these functions
add nothing to that, because one decoded token calls them some 150 times.

Letters: T tokens of all sequences, one after the other; S sequences; H hidden size; D head size; Hq query
heads; Hkv key and value heads, Hq a multiple of Hkv. The cache is ``[blocks, block_size, Hkv, D]``; slot
``s`` is row ``s % block_size`` of block ``s // block_size``.

`isa` is an instruction set of `kernels_ext.available_isas`, or None for the best; CPU only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .ops import ISAS

_ops = torch.ops.kernels_ext


def rms_norm(x: Tensor, weight: Tensor, eps: float, isa: str | None = None) -> Tensor:
    """Root-mean-square norm of each row: ``round(weight * round(x / sqrt(mean(x**2) + eps)))``.

    The order of roundings is that of transformers' ``LlamaRMSNorm``.

    Args:
        x: ``[T, H]``, H >= 1.
        weight: ``[H]``.
        eps: added to the mean square.
        isa: see the module.

    Returns:
        ``[T, H]``. A row's result does not depend on the other rows.

    Raises:
        ValueError: a shape, dtype, device or layout above does not hold.
    """
    y: Tensor = _ops.rms_norm.default(x, weight, eps, _isa_number(isa))
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, isa: str | None = None) -> Tensor:
    """Add x to the residual stream, in place, and norm the sum: ``residual = round(residual + x)``.

    Args:
        x: ``[T, H]``, H >= 1.
        residual: ``[T, H]``; written.
        weight: ``[H]``.
        eps: added to the mean square.
        isa: see the module.

    Returns:
        ``rms_norm(residual, weight, eps)`` of the updated residual.

    Raises:
        ValueError: a shape, dtype, device or layout above does not hold; residual is then unchanged.
    """
    y: Tensor = _ops.add_rms_norm.default(x, residual, weight, eps, _isa_number(isa))
    return y


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    isa: str | None = None,
) -> Tensor:
    """Rotate queries and keys to their positions, and store keys and values in the paged cache.

    The ``rotate_half`` convention: with ``h = R / 2``, elements ``i`` and ``i + h`` of a head form a pair.
    The first R elements of a head are rotated and the rest pass through; ``R = 0`` stores without rotating.
    Computed in float32 and rounded once.

    Args:
        qkv: ``[T, (Hq + 2 * Hkv) * D]``: query heads, then key heads, then value heads.
        cos, sin: float32 ``[P, R]``, R even and at most D, for positions 0 to P - 1; both halves of a row, as
            transformers' rotary embeddings return them.
        positions: int64 ``[T]``, each in 0 to P - 1.
        slot_mapping: int64 ``[T]``, a different slot for each token.
        k_cache, v_cache: ``[blocks, block_size, Hkv, D]``; written at the tokens' slots and nowhere else.
        num_heads: Hq.
        q_norm_weight, k_norm_weight: ``[D]``, or None. Where given, each head goes through `rms_norm` with
            this weight before it is rotated (Qwen3).
        eps: of those norms.
        isa: see the module.

    Returns:
        The rotated queries, ``[T, Hq, D]``.

    Raises:
        ValueError: something above does not hold; the caches are then unchanged. Not checked: that slots
            differ; and indices, except on the CPU (elsewhere that would wait for the device).
    """
    q: Tensor = _ops.rope_kv_write.default(
        qkv,
        cos,
        sin,
        positions,
        slot_mapping,
        k_cache,
        v_cache,
        num_heads,
        q_norm_weight,
        k_norm_weight,
        eps,
        _isa_number(isa),
    )
    return q


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    isa: str | None = None,
) -> Tensor:
    """Causal attention of new tokens over their sequences' cached keys and values, their own included.

    Decoding and (chunked) prefill are the same call: a sequence with n query tokens and a context of c has
    them at positions ``c - n`` to ``c - 1``, and the token at position p sees positions 0 to p, or with a
    window the last `window` of those. Query head h reads KV head ``h // (Hq / Hkv)``.

    On one CPU a token's result is the same bits whatever else is in the batch, however its prompt was split
    into chunks, and with any number of threads. It differs in the last bits between instruction sets.

    Args:
        q: ``[T, Hq, D]``.
        k_cache, v_cache: ``[blocks, block_size, Hkv, D]``.
        block_tables: int32 ``[S, max_blocks]``; entry i of a row is the block of positions ``i * block_size``
            and on. Entries past the context, or wholly before every window, are not read and may hold
            anything.
        query_start: int32 ``[S + 1]``, from 0 to T without falling: sequence s owns rows
            ``query_start[s]`` to ``query_start[s + 1] - 1`` of q. A sequence may own none.
        context_lens: int32 ``[S]``: cached tokens, the queries among them.
        scale: factor on the scores, usually ``D ** -0.5``.
        window: None, or how many positions a token sees, at least 1 (itself).
        isa: see the module.

    Returns:
        ``[T, Hq * D]``.

    Raises:
        ValueError: something above does not hold. query_start, context_lens and block entries are checked
            on the CPU only: elsewhere that would wait for the device.
    """
    y: Tensor = _ops.paged_attention.default(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        context_lens,
        scale,
        window,
        _isa_number(isa),
    )
    return y


def silu_mul(gate_up: Tensor, isa: str | None = None) -> Tensor:
    """Gated activation: ``round(round(silu(gate)) * up)`` with ``silu(g) = g / (1 + exp(-g))``.

    Args:
        gate_up: ``[T, 2 * F]``: gate in the first half of a row, up in the second.
        isa: see the module.

    Returns:
        ``[T, F]``.

    Raises:
        ValueError: a shape, dtype, device or layout above does not hold.
    """
    y: Tensor = _ops.silu_mul.default(gate_up, _isa_number(isa))
    return y


def _isa_number(isa: str | None) -> int:
    if isa is None:
        return 0
    if isa not in ISAS:
        raise ValueError(f"isa must be one of {', '.join(ISAS)}, got {isa!r}")
    return ISAS[isa]


# --- fake kernels: shapes and dtypes alone, for torch.compile -----------------------------------------------

_Fake = TypeVar("_Fake", bound=Callable[..., Tensor])


def _register_fake(op: str) -> Callable[[_Fake], _Fake]:
    register: Callable[[_Fake], _Fake] = torch.library.register_fake(f"kernels_ext::{op}")
    return register


@_register_fake("rms_norm")
def _(x: Tensor, weight: Tensor, eps: float, isa: int = 0) -> Tensor:
    return torch.empty_like(x)


@_register_fake("add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, isa: int = 0) -> Tensor:
    return torch.empty_like(x)


@_register_fake("rope_kv_write")
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    isa: int = 0,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads, k_cache.shape[3]))


@_register_fake("paged_attention")
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    isa: int = 0,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


@_register_fake("silu_mul")
def _(gate_up: Tensor, isa: int = 0) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
