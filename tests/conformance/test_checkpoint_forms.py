"""A quick part of checkpoint_forms.py: some forms on some models, all edge matrices, some corruptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.checkpoint_forms import (
    FORMS,
    OURS,
    check_edges,
    check_form,
    run_corruptions,
    save_source,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama."""
    path = tmp_path_factory.mktemp("llama") / "source"
    save_source("llama", path)
    return path


@pytest.mark.parametrize("form", [*FORMS, *OURS])
def test_every_form_gives_the_logits_of_its_dense_source(form: str, llama: Path, tmp_path: Path) -> None:
    """Bit for bit through transformers; served, those of the plain form."""
    row = check_form("llama", form, tmp_path, llama)
    assert row.exact
    assert row.as_plain
    assert row.served_difference < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "opt", "qwen3_moe"])
def test_other_architectures_load_from_every_packed_naming(name: str, tmp_path: Path) -> None:
    """Transposed layers, biases, experts."""
    source = tmp_path / "source"
    save_source(name, source)
    for form in ("sparse-bitmask, <= 0.8.1", "weight_orig and weight_mask", "packed"):
        (tmp_path / form[:6]).mkdir()
        row = check_form(name, form, tmp_path / form[:6], source)
        assert row.exact, form
        assert row.as_plain, form
        assert row.served_difference < 1e-4, form


def test_every_edge_matrix_comes_back(tmp_path: Path) -> None:
    """NaN payloads, infinities, subnormals, odd sizes, and the sign of zeros where it is kept."""
    wrong = {
        (name, check)
        for name, checks in check_edges(tmp_path).items()
        for check, good in checks.items()
        if not good
    }
    assert wrong == set()


def test_corruptions_are_refused_or_harmless(tmp_path: Path) -> None:
    """And in Lacunar's own form never anything else: its digests see every bit."""
    outcomes = run_corruptions(tmp_path, 300)
    assert sum(count for (_, kind), count in outcomes.items() if kind == "refused") > 100
    assert {kind for form, kind in outcomes if form.startswith("packed")} <= {"refused", "harmless"}
