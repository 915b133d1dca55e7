"""Which weights go: scores, and the selection of the lowest in each output row or in each small group.

Everything here is a pure function of its arguments and deterministic: ties go to the lower column. SparseGPT,
which also changes the weights that stay, is in sparsegpt.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Method = Literal["magnitude", "wanda", "sparsegpt"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, slots=True)
class Pattern:
    """At most `kept` non-zeros in every `group` neighbours of a row; written ``kept:group``, as 2:4."""

    kept: int
    group: int

    def __post_init__(self) -> None:
        if not 0 < self.kept < self.group:
            raise ValueError(f"pattern {self}: expected fewer non-zeros than elements, and at least 1")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read ``2:4``; ValueError when it is not of that form."""
        found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
        if found is None:
            raise ValueError(f"pattern is {text!r}, expected two numbers like 2:4")
        return cls(int(found[1]), int(found[2]))

    @property
    def sparsity(self) -> float:
        """Share of zeros."""
        return 1 - self.kept / self.group

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


Target = float | Pattern
"""How many weights go: a share of each row, or a pattern."""


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


def lowest_per_group(scores: Tensor, pattern: Pattern) -> Tensor:
    """Mark the lowest scores of each group, so that a pattern's number is left.

    Args:
        scores: ``[N, K]``, any float type, no NaN; K a multiple of the group.
        pattern: what is to be left.

    Returns:
        ``[N, K]`` bool. Of equal scores the one in the lower column is marked first.

    Raises:
        ValueError: K is no multiple of the group.
    """
    N, K = scores.shape
    if K % pattern.group:
        raise ValueError(f"K is {K}, expected a multiple of {pattern.group} for the pattern {pattern}")
    groups = scores.reshape(N, K // pattern.group, pattern.group)
    order = groups.argsort(dim=2, stable=True)[:, :, : pattern.group - pattern.kept]
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter_(2, order, True).view(N, K)


def lowest(scores: Tensor, target: Target) -> Tensor:
    """Mark what goes: `lowest_per_group` for a pattern, `lowest_per_row` for a share."""
    return lowest_per_group(scores, target) if isinstance(target, Pattern) else lowest_per_row(scores, target)


def require_finite(weight: Tensor) -> None:
    """Raise ValueError unless ``weight`` is a float matrix of finite values."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"expected a float matrix, got {weight.dtype} {list(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight holds NaN or Inf; a model with such weights cannot be pruned sensibly")


def prune_weight(weight: Tensor, target: Target, feature_norms: Tensor | None = None) -> Tensor:
    """Zero the weights with the lowest scores in each output row, or in each group of one.

    Args:
        weight: ``[N, K]`` float32, bfloat16 or float16, finite.
        target: share of zeros in each row (0 to 1), or a pattern. Zeros that are there already count.
        feature_norms: ``[K]`` for Wanda; None prunes by magnitude.

    Returns:
        A new ``[N, K]`` tensor of the same type: each element is the old one or +0.

    Raises:
        ValueError: the weight is not a float matrix, holds NaN or Inf, or K does not fit the pattern.
    """
    require_finite(weight)
    if feature_norms is None:
        scores = magnitude_scores(weight)
    else:
        scores = wanda_scores(weight, feature_norms)
        if not bool(torch.isfinite(scores).all()):
            raise ValueError("the layer's input overflows: |W| times the norm of a feature is NaN or Inf")
    return weight.masked_fill(lowest(scores, target), 0.0)


def outlier_share(weight: Tensor, feature_norms: Tensor, times: float = 5.0) -> tuple[int, int]:
    """Count the Wanda scores that are over ``times`` their mean, and all of them.

    Source: Yin et al., Outlier Weighed Layerwise Sparsity (ICML 2024), section 3.2: the ratio D of a layer.
    """
    scores = wanda_scores(weight, feature_norms)
    return int((scores > times * scores.mean()).sum()), scores.numel()


def owl_sparsities(shares: list[float], sparsity: float, spread: float = 0.08) -> list[float]:
    """Spread a sparsity over layers: the more outliers a layer has, the more of it stays.

    Args:
        shares: share of outliers of each layer.
        sparsity: the mean that is wanted, 0 to 1.
        spread: layers get from ``sparsity - spread`` to ``sparsity + spread`` (before shifting to the mean).

    Returns:
        One sparsity for each layer, kept within 0 and 1; their mean is `sparsity` where that does not clip.

    Source: Yin et al. (ICML 2024), section 3.3, with its default of 0.08.
    """
    low, high = min(shares), max(shares)
    if high == low:
        return [sparsity] * len(shares)
    kept = [(share - low) / (high - low) * 2 * spread for share in shares]
    mean = sum(kept) / len(kept)
    return [min(1.0, max(0.0, sparsity - value + mean)) for value in kept]


def sparsity_of(weight: Tensor) -> float:
    """Share of zeros (+0 or -0) in a tensor; 0 for an empty one."""
    return 1.0 - int(torch.count_nonzero(weight)) / weight.numel() if weight.numel() else 0.0
