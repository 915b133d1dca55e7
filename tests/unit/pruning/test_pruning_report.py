"""Perplexity, against transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.pruning.calibration import CalibrationOptions
from service.pruning.methods import prune_weight
from service.pruning.prune import PruneOptions, prune
from service.pruning.report import PerplexityOptions, perplexity, quality_report


def direct_perplexity(model: torch.nn.Module, directory: Path, text: Path, context: int) -> float:
    """One window at a time through the whole model, with transformers' own loss."""
    ids = AutoTokenizer.from_pretrained(directory)(text.read_text("utf-8"), return_tensors="pt").input_ids[0]
    losses = []
    with torch.inference_mode():
        for start in range(0, len(ids) // context * context, context):
            window = ids[None, start : start + context]
            losses.append(float(model(input_ids=window, labels=window).loss))
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_perplexity_equals_transformers_loss(kind: str, make_model: Callable[..., Path], text: Path) -> None:
    """1200 tokens in windows of 90: 13 windows, the rest is left out."""
    directory = make_model(kind)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    got = perplexity(directory, PerplexityOptions(text=text, context_tokens=90))

    assert got.predicted_tokens == 13 * 89
    assert got.perplexity == pytest.approx(direct_perplexity(model, directory, text, 90), rel=1e-5)
    assert got.nll == pytest.approx(math.log(got.perplexity))


def test_packed_and_dense_output_measure_alike(
    make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """The same weights must give the same figure, exactly."""
    source = make_model("llama", dtype=torch.bfloat16)
    options = PerplexityOptions(text=text, context_tokens=100)
    prune(source, tmp_path / "packed", PruneOptions(method="magnitude"))
    prune(source, tmp_path / "dense", PruneOptions(method="magnitude", output="dense"))

    assert perplexity(tmp_path / "packed", options) == perplexity(tmp_path / "dense", options)


def test_the_report_compares_dense_magnitude_and_wanda(
    make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """The magnitude row is what pruning by magnitude would have given, skipped layers included."""
    source = make_model("llama")
    calibration = CalibrationOptions(text=text, sequences=4, sequence_tokens=60)
    report = prune(source, tmp_path / "out", PruneOptions(calibration=calibration, skip="down_proj"))
    options = PerplexityOptions(text=text, context_tokens=64, windows=5)

    quality = quality_report(source, tmp_path / "out", report, options)

    prune(source, tmp_path / "magnitude", PruneOptions(method="magnitude", skip="down_proj"))
    want = [perplexity(d, options).perplexity for d in (source, tmp_path / "magnitude", tmp_path / "out")]
    assert [row.model for row in quality.rows] == ["dense", "magnitude 50%", "wanda 50%"]
    assert [row.perplexity for row in quality.rows] == want
    assert len(set(want)) == 3
    assert (quality.context_tokens, quality.windows) == (64, 5)
    written = json.loads((tmp_path / "out" / "perplexity.json").read_text("utf-8"))
    assert written == quality.to_json()


def test_a_model_pruned_by_magnitude_is_compared_with_dense_alone(
    make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """The same figure twice would look like two measurements."""
    source = make_model("llama")
    report = prune(source, tmp_path / "out", PruneOptions(method="magnitude", sparsity=0.25))
    quality = quality_report(
        source, tmp_path / "out", report, PerplexityOptions(text=text, context_tokens=64)
    )

    assert [row.model for row in quality.rows] == ["dense", "magnitude 25%"]


def test_the_table_states_the_context_length(
    make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """A perplexity without it cannot be compared with anything."""
    source = make_model("llama")
    report = prune(source, tmp_path / "out", PruneOptions(method="magnitude"))
    table = quality_report(
        source, tmp_path / "out", report, PerplexityOptions(text=text, context_tokens=64)
    ).table()

    lines = table.splitlines()
    assert lines[1].startswith("dense")
    assert lines[1].endswith("1.00x")
    assert lines[-1] == "text.txt: 18 windows of 64 tokens, 1134 predicted tokens, float32"


def test_transform_replaces_weights_for_this_pass_alone(make_model: Callable[..., Path], text: Path) -> None:
    """The figure is that of the changed model; the directory is as before."""
    directory = make_model("llama")
    options = PerplexityOptions(text=text, context_tokens=100)
    before = perplexity(directory, options)
    changed = perplexity(directory, options, transform=lambda _, weight: prune_weight(weight, 0.9))

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.copy_(prune_weight(module.weight, 0.9))
    assert changed.perplexity == pytest.approx(direct_perplexity(model, directory, text, 100), rel=1e-5)
    assert perplexity(directory, options) == before != changed


@pytest.mark.parametrize("values", [{"context_tokens": 1}, {"windows": 0}])
def test_impossible_options_are_refused(values: dict[str, int]) -> None:
    """One token predicts nothing."""
    with pytest.raises(ValueError, match="expected at least"):
        PerplexityOptions(**values)
