"""Which weights go: scores, and the selection of the lowest in each output row.

Everything here is a pure function of its arguments and deterministic: ties go to the lower column.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Method = Literal["magnitude", "wanda"]
METHODS: tuple[Method, ...] = get_args(Method)


def magnitude_scores(weight: Tensor) -> Tensor:
    """``|W|`` in float32, ``[N, K]``."""
    return weight.float().abs()


def wanda_scores(weight: Tensor, feature_norms: Tensor) -> Tensor:
    """``|W[n, k]| * ||x[:, k]||_2`` in float32, ``[N, K]``.

    Args:
        weight: ``[N, K]``.
        feature_norms: ``[K]``, the norm of each input feature over the calibration tokens.

    Source: Sun et al., A Simple and Effective Pruning Approach for Large Language Models (ICLR 2024),
    section 3.
    """
    if feature_norms.shape != weight.shape[1:]:
        raise ValueError(
            f"wanda_scores: feature_norms has shape {list(feature_norms.shape)}, "
            f"but the weight is {list(weight.shape)}"
        )
    return weight.float().abs() * feature_norms.to(device=weight.device, dtype=torch.float32)


def zeros_per_row(K: int, sparsity: float) -> int:
    """How many of a row's K weights go: K * sparsity rounded down, so 0.3 of 576 is 172 (0.2986)."""
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"sparsity is {sparsity}, expected 0 to 1")
    # 0.29 * 100 is 28.999999999999996 in binary; no product here is closer to an integer than 1e-9 by chance.
    return math.floor(K * sparsity + 1e-9)


def lowest_per_row(scores: Tensor, sparsity: float) -> Tensor:
    """Mark the lowest scores of each row.

    Args:
        scores: ``[N, K]``, any float type, no NaN.
        sparsity: share of each row to mark, 0 to 1; see `zeros_per_row` for the rounding.

    Returns:
        ``[N, K]`` bool with exactly ``zeros_per_row(K, sparsity)`` marks in every row. Of equal scores the
        one in the lower column is marked first.
    """
    count = zeros_per_row(scores.shape[1], sparsity)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    if count == 0 or scores.shape[0] == 0:
        return mask
    threshold = scores.kthvalue(count, dim=1, keepdim=True).values
    below = scores < threshold
    level = scores == threshold
    # A stable sort of whole rows gives the same marks, but takes longer than a selection.
    open_places = count - below.sum(dim=1, keepdim=True)
    return below | (level & (level.cumsum(dim=1) <= open_places))


def prune_weight(weight: Tensor, sparsity: float, feature_norms: Tensor | None = None) -> Tensor:
    """Zero the weights with the lowest scores in each output row.

    Args:
        weight: ``[N, K]`` float32, bfloat16 or float16, finite.
        sparsity: share of zeros in each row, 0 to 1. Zeros that are there already count.
        feature_norms: ``[K]`` for Wanda; None prunes by magnitude.

    Returns:
        A new ``[N, K]`` tensor of the same type: each element is the old one or +0.

    Raises:
        ValueError: the weight is not a float matrix or holds NaN or Inf.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"expected a float matrix, got {weight.dtype} {list(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight holds NaN or Inf; a model with such weights cannot be pruned sensibly")
    if feature_norms is None:
        scores = magnitude_scores(weight)
    else:
        scores = wanda_scores(weight, feature_norms)
        if not bool(torch.isfinite(scores).all()):
            raise ValueError("the layer's input overflows: |W| times the norm of a feature is NaN or Inf")
    return weight.masked_fill(lowest_per_row(scores, sparsity), 0.0)


def sparsity_of(weight: Tensor) -> float:
    """Share of zeros (+0 or -0) in a tensor; 0 for an empty one."""
    return 1.0 - int(torch.count_nonzero(weight)) / weight.numel() if weight.numel() else 0.0
