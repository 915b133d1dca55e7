"""The scores and the selection, against slow obvious references."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from service.pruning.methods import (
    lowest_per_row,
    magnitude_scores,
    prune_weight,
    sparsity_of,
    wanda_scores,
    zeros_per_row,
)


def slow_mask(scores: Tensor, sparsity: float) -> Tensor:
    """Sort each row in Python; of equal scores the lower column goes first."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    K = scores.shape[1]
    for n, row in enumerate(scores.tolist()):
        order = sorted(range(K), key=lambda k: (row[k], k))
        for k in order[: int(Fraction(str(sparsity)) * K)]:
            mask[n, k] = True
    return mask


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.3, 0.5, 0.29, 0.999, 1.0])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (3, 7), (5, 8), (4, 64), (2, 100), (0, 8)])
def test_selection_matches_a_python_sort(N: int, K: int, sparsity: float) -> None:
    """Few distinct scores, so that ties fall on the boundary."""
    scores = torch.randint(0, 5, (N, K), generator=torch.Generator().manual_seed(N * K)).float()

    assert torch.equal(lowest_per_row(scores, sparsity), slow_mask(scores, sparsity))


@pytest.mark.parametrize(
    ("K", "sparsity", "count"),
    [(576, 0.3, 172), (100, 0.29, 29), (10, 0.3, 3), (1, 0.99, 0), (7, 1.0, 7), (576, 0.5, 288)],
)
def test_a_row_loses_its_share_rounded_down(K: int, sparsity: float, count: int) -> None:
    """0.29 * 100 is 28.999999999999996 in binary arithmetic, and 29 was meant."""
    assert zeros_per_row(K, sparsity) == count


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
def test_sparsity_outside_zero_to_one_is_refused(sparsity: float) -> None:
    """A percentage given by mistake must not prune everything."""
    with pytest.raises(ValueError, match="sparsity is"):
        zeros_per_row(8, sparsity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanda", [False, True])
def test_pruning_keeps_values_and_counts(dtype: torch.dtype, wanda: bool) -> None:
    """Every row has exactly its zeros, every other element is untouched, and so is the argument."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(9, 44, generator=generator).to(dtype)
    before = weight.clone()
    norms = torch.rand(44, generator=generator, dtype=torch.float64) if wanda else None
    scores = weight.float().abs() * norms.float() if norms is not None else weight.float().abs()

    pruned = prune_weight(weight, 0.3, norms)

    mask = slow_mask(scores, 0.3)
    assert pruned.dtype == dtype
    assert torch.equal(pruned, torch.where(mask, torch.zeros((), dtype=dtype), weight))
    assert not torch.signbit(pruned[mask]).any()
    assert (pruned == 0).sum(dim=1).tolist() == [13] * 9
    assert torch.equal(weight, before)


def test_zeros_that_are_there_count_towards_the_share() -> None:
    """Pruning a pruned matrix again at the same sparsity changes nothing."""
    weight = prune_weight(torch.randn(6, 40, generator=torch.Generator().manual_seed(0)), 0.5)

    assert torch.equal(prune_weight(weight, 0.5), weight)
    assert sparsity_of(weight) == 0.5


def test_wanda_has_less_output_error_than_magnitude_when_features_differ_in_size() -> None:
    """What Wanda is for: a small weight on a loud feature matters more than a large one on a silent one."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(32, 64, generator=generator)
    loudness = torch.logspace(-2, 1, 64)[torch.randperm(64, generator=generator)]
    x = torch.randn(256, 64, generator=generator) * loudness

    def error(pruned: Tensor) -> float:
        return float((x @ pruned.T - x @ weight.T).square().mean())

    assert error(prune_weight(weight, 0.5, x.norm(dim=0))) < 0.1 * error(prune_weight(weight, 0.5))


def test_equal_norms_make_wanda_magnitude() -> None:
    """The norm only weighs the columns of a row against each other."""
    weight = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))

    assert torch.equal(
        lowest_per_row(wanda_scores(weight, torch.full((24,), 3.0)), 0.5),
        lowest_per_row(magnitude_scores(weight), 0.5),
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    """NaN compares with nothing, so a row with one would get too few zeros."""
    weight = torch.ones(2, 4)
    weight[1, 2] = bad

    with pytest.raises(ValueError, match="NaN or Inf"):
        prune_weight(weight, 0.5)


def test_norms_of_the_wrong_length_are_refused() -> None:
    """A length of 1 would otherwise broadcast."""
    with pytest.raises(ValueError, match=r"feature_norms has shape \[1\]"):
        wanda_scores(torch.ones(2, 4), torch.ones(1))
