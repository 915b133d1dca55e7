"""Shared by the kernel tests: seeded matrices and a comparison that says what is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


class Rng:
    """Random matrices from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def activations(self, M: int, K: int, dtype: torch.dtype) -> Tensor:
        """Gaussian ``[M, K]``."""
        return torch.randn(M, K, generator=self.generator).to(dtype)

    def pruned(self, N: int, K: int, sparsity: float, dtype: torch.dtype) -> Tensor:
        """Gaussian ``[N, K]`` with each element zero by chance."""
        weight = torch.randn(N, K, generator=self.generator)
        zero = torch.rand(N, K, generator=self.generator) < sparsity
        return weight.masked_fill(zero, 0.0).to(dtype)


@pytest.fixture
def matrices() -> Rng:
    return Rng(seed=7)


def assert_at_most_twice_as_wrong(got: Tensor, dense: Tensor, want: Tensor, what: str) -> None:
    """`got` may be at most twice as far from `want` (float64) as torch's product in the same dtype is."""
    assert got.dtype == dense.dtype
    assert got.shape == want.shape
    if got.numel() == 0:
        return
    allowed = 2 * (dense.double() - want).abs().max() + 1e-6 * (1 + want.abs().max())
    error = (got.double() - want).abs()
    wrong = ~(error <= allowed)  # so that NaN is wrong
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        pytest.fail(
            f"{what}: {int(wrong.sum())} of {got.numel()} wrong; first y{list(at)} = {got[at].item()}, "
            f"want {want[at].item()}, allowed error {allowed.item():.2e}"
        )
