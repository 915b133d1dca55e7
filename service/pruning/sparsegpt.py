"""SparseGPT: prune a layer column by column and let the weights that stay make up for those that go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .methods import Pattern, Target, lowest_per_group, require_finite

# Columns whose pruning is decided at once; the paper's choice (section 3.2).
BLOCK_COLUMNS = 128
# Added to the diagonal, as a share of its mean: the authors' 0.01, and more where that is too little.
DAMPING = 0.01
_MOST_DAMPING = 10.0


@dataclass(frozen=True, slots=True)
class InverseFactor:
    """What the calibration tokens say of a layer's inputs; layers with the same input share it.

    Attributes:
        upper: ``[K, K]``, upper Cholesky factor of the inverse of ``x.T @ x`` with damping.
        dead: ``[K]`` bool, features that were zero in every token.
    """

    upper: Tensor
    dead: Tensor


def sparsegpt_prune(weight: Tensor, inputs: InverseFactor, target: Target) -> Tensor:
    """Prune a weight so that ``x @ W.T`` changes little over the calibration tokens.

    Args:
        weight: ``[N, K]`` float32, bfloat16 or float16, finite.
        inputs: made by `inverse_factor` from the calibration tokens.
        target: share of zeros (0 to 1) in each block of 128 columns over all rows, or a pattern.

    Returns:
        A new ``[N, K]`` tensor of the same type. Weights that stay have changed. A feature that was zero in
        every token has zero weights.

    Raises:
        ValueError: a shape does not fit, or a weight is not finite.

    Source: Frantar and Alistarh, SparseGPT (ICML 2023), algorithm 1. Differs from it: of equal scores the
    first goes, and exactly the share's number goes (the authors' threshold takes ties along).
    """
    require_finite(weight)
    K = weight.shape[1]
    if inputs.upper.shape != (K, K):
        raise ValueError(f"sparsegpt: inputs are {list(inputs.upper.shape)}, but the weight has K={K}")
    if isinstance(target, Pattern) and K % target.group:
        raise ValueError(f"K is {K}, expected a multiple of {target.group} for the pattern {target}")
    W = weight.float().clone()
    W[:, inputs.dead] = 0.0
    inverse = inputs.upper
    for first in range(0, K, BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, K)
        block, factor = W[:, first:last].clone(), inverse[first:last, first:last]
        errors = torch.zeros_like(block)
        diagonal = factor.diagonal()
        mask = None
        if not isinstance(target, Pattern):
            mask = _lowest_of_block((block / diagonal).square_(), target)
        for column in range(last - first):
            if isinstance(target, Pattern):
                if column % target.group == 0:
                    # A group is chosen when its turn comes, by the weights as they have become.
                    span = slice(column, column + target.group)
                    group = lowest_per_group((block[:, span] / diagonal[span]).square_(), target)
                gone = group[:, column % target.group]
            else:
                assert mask is not None
                gone = mask[:, column]
            values = block[:, column]
            error = torch.where(gone, values, 0.0) / diagonal[column]
            errors[:, column] = error
            # Adds the error to the columns after this one; its own becomes zero below, exactly.
            block[:, column:].addr_(error, factor[column, column:], alpha=-1.0)
            block[:, column].masked_fill_(gone, 0.0)
        W[:, first:last] = block
        W[:, last:].addmm_(errors, inverse[first:last, last:], alpha=-1.0)
    return W.to(weight.dtype)


def _lowest_of_block(scores: Tensor, sparsity: float) -> Tensor:
    """Mark the lowest share of a block over all its rows; of equal scores the first in row order."""
    count = int(scores.numel() * sparsity + 1e-9)
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    if count:
        flat = scores.reshape(-1)
        threshold = flat.kthvalue(count).values
        below, level = flat < threshold, flat == threshold
        mask = below | (level & (level.cumsum(0) <= count - below.sum()))
    return mask.view(scores.shape)


def inverse_factor(gram: Tensor) -> InverseFactor:
    """Factor the inverse of the inputs' matrix, damped as much as it needs.

    Args:
        gram: ``[K, K]`` float32, ``x.T @ x`` over the calibration tokens, up to a factor; overwritten.

    Raises:
        ValueError: it is not finite, or no damping makes it positive definite.
    """
    if not bool(torch.isfinite(gram).all()):
        raise ValueError("the layer's input overflows: x.T @ x over the calibration tokens is NaN or Inf")
    dead = gram.diagonal() == 0
    gram.diagonal()[dead] = 1.0
    mean = float(gram.diagonal().mean())
    damping, added = DAMPING, 0.0
    while damping <= _MOST_DAMPING:
        gram.diagonal().add_(damping * mean - added)
        added = damping * mean
        factor, failed = torch.linalg.cholesky_ex(gram)
        if not int(failed):
            inverse = torch.cholesky_inverse(factor)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return InverseFactor(upper, dead)
        damping *= 10
    raise ValueError(
        f"sparsegpt: the inputs' matrix [{gram.shape[0]}, {gram.shape[0]}] is not positive definite with "
        f"{_MOST_DAMPING:g} times its mean diagonal added; the calibration text may be too short"
    )
