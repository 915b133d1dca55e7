"""SparseGPT against a slow float64 version of the algorithm, and where it must beat plain selection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from service.pruning.methods import Pattern, prune_weight
from service.pruning.sparsegpt import inverse_factor, sparsegpt_prune


def inputs(K: int, seed: int = 0) -> Tensor:
    """Correlated features of different loudness."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator) / K**0.5 + torch.eye(K)
    loudness = torch.logspace(-1, 1, K)[torch.randperm(K, generator=generator)]
    return torch.randn(4 * K, K, generator=generator) @ mix * loudness


def slow(weight: Tensor, x: Tensor, gone: Tensor) -> Tensor:
    """Remove the marked weights from left to right, each time with the best change of what is right of it.

    The update for a removed weight k is -w_k / [H_k^-1]_00 times the first column of H_k^-1, where H_k is
    that of the columns from k on.
    """
    W, H = weight.double().clone(), (x.T @ x).double()
    H += 0.01 * H.diagonal().mean() * torch.eye(H.shape[0], dtype=torch.float64)
    for k in range(W.shape[1]):
        column = torch.linalg.inv(H[k:, k:])[:, 0]
        scale = torch.where(gone[:, k], W[:, k], 0.0) / column[0]
        W[:, k:] -= scale[:, None] * column
        W[gone[:, k], k] = 0
    return W


@pytest.mark.parametrize("target", [0.5, 0.3, Pattern(2, 4)])
@pytest.mark.parametrize("K", [8, 128, 200])
def test_what_stays_is_what_the_paper_says(K: int, target: float | Pattern) -> None:
    """Given which weights go, the values of the others follow; blocks of 128 must not show."""
    x = inputs(K)
    weight = torch.randn(16, K, generator=torch.Generator().manual_seed(1))
    pruned = sparsegpt_prune(weight, inverse_factor(x.T @ x), target)
    want = slow(weight, x, pruned == 0)

    torch.testing.assert_close(pruned.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("target", [0.5, Pattern(2, 4)])
def test_it_changes_the_output_less_than_wanda(target: float | Pattern) -> None:
    """What it is for."""
    x = inputs(192, seed=3)
    weight = torch.randn(32, 192, generator=torch.Generator().manual_seed(2))

    def error(pruned: Tensor) -> float:
        return float((x @ pruned.T - x @ weight.T).square().mean())

    ours = sparsegpt_prune(weight, inverse_factor(x.T @ x), target)
    assert error(ours) < 0.9 * error(prune_weight(weight, target, x.norm(dim=0)))


def test_the_share_is_exact_in_every_block_of_columns() -> None:
    """Rows may differ: that is the paper's choice for SparseGPT."""
    x = inputs(200)
    weight = torch.randn(12, 200, generator=torch.Generator().manual_seed(4))
    pruned = sparsegpt_prune(weight, inverse_factor(x.T @ x), 0.3)
    zeros = pruned == 0

    assert int(zeros[:, :128].sum()) == int(12 * 128 * 0.3)
    assert int(zeros[:, 128:].sum()) == int(12 * 72 * 0.3)


def test_a_feature_that_is_always_zero_is_dropped_and_harmless() -> None:
    """A column of zeros makes the matrix singular."""
    x = inputs(16)
    x[:, [3, 9]] = 0
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    pruned = sparsegpt_prune(weight, inverse_factor(x.T @ x), 0.5)

    assert not pruned[:, [3, 9]].any()
    assert bool(torch.isfinite(pruned).all())


def test_few_tokens_are_damped_until_it_works() -> None:
    """Fewer tokens than features: the matrix has no inverse of its own."""
    x = inputs(64)[:3]
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))

    assert bool(torch.isfinite(sparsegpt_prune(weight, inverse_factor(x.T @ x), 0.5)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_is_kept(dtype: torch.dtype) -> None:
    """Rounded once, at the end."""
    x = inputs(16)
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(7)).to(dtype)
    factor = inverse_factor(x.T @ x)

    assert torch.equal(
        sparsegpt_prune(weight, factor, 0.5), sparsegpt_prune(weight.float(), factor, 0.5).to(dtype)
    )


def test_inputs_that_overflow_are_refused() -> None:
    """A NaN would spread over the whole layer."""
    with pytest.raises(ValueError, match="overflows"):
        inverse_factor(torch.full((2, 2), float("inf")))
