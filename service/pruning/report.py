"""Perplexity on held-out text: what pruning cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from service.data import HELDOUT_TEXT
from service.model.checkpoint import Checkpoint

from .calibration import TokenWindows, token_windows
from .layerwise import LayerwiseModel, matrix_of
from .methods import Pattern, prune_weight
from .progress import Progress, no_progress
from .prune import PruneReport
from .writer import write_json

PERPLEXITY_FILE = "perplexity.json"

_BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions:
    """On what to measure.

    Attributes:
        text: a UTF-8 file that calibration has not seen; the shipped excerpt when not given.
        context_tokens: length of a window. Figures of different lengths cannot be compared.
        windows: upper bound on windows, spread evenly over the text; None takes all.
        device: where the arithmetic runs, "cpu" or "cuda"; always in float32.
    """

    text: Path = HELDOUT_TEXT
    context_tokens: int = 1024
    windows: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.context_tokens < 2 or (self.windows is not None and self.windows < 1):
            raise ValueError(
                f"context_tokens is {self.context_tokens} and windows {self.windows}, "
                "expected at least 2 and 1"
            )


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """One model's figure: ``exp`` of the mean negative log likelihood, in nats, over `predicted_tokens`."""

    model: str
    perplexity: float
    nll: float
    predicted_tokens: int


@dataclass(frozen=True, kw_only=True)
class QualityReport:
    """Perplexities of one text under the same conditions, the dense model's first."""

    text: str
    text_sha256: str
    context_tokens: int
    windows: int
    rows: list[Perplexity]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The report as text: one line per model, and under it how it was measured."""
        width = max(len(row.model) for row in self.rows)
        dense = self.rows[0].perplexity
        lines = [f"{'model':<{width}}  perplexity  against {self.rows[0].model}"]
        lines += [
            f"{row.model:<{width}}  {row.perplexity:10.2f}  {row.perplexity / dense:.2f}x"
            for row in self.rows
        ]
        lines.append(
            f"{self.text}: {self.windows} windows of {self.context_tokens} tokens, "
            f"{self.rows[0].predicted_tokens} predicted tokens, float32"
        )
        return "\n".join(lines)


def perplexity(
    model: Path,
    options: PerplexityOptions | None = None,
    progress: Progress = no_progress,
    *,
    name: str = "model",
    transform: Callable[[str, Tensor], Tensor] | None = None,
) -> Perplexity:
    """Measure a model directory, dense or packed, with one decoder layer in memory at a time.

    The windows do not overlap; in each, every token but the first is predicted from those before it.

    Args:
        model: a directory with safetensors and a tokenizer.
        options: text and context length.
        progress: called with "perplexity of <name>" and the share done.
        name: what to call the model.
        transform: given a linear's name and weight, returns the weight to use instead.

    Raises:
        CheckpointError, ValueError: the model cannot be run, or the text is shorter than one window.
    """
    options = options or PerplexityOptions()
    return _measure(model, options, _windows(model, options), name, transform, progress)


def quality_report(
    model: Path,
    pruned: Path,
    report: PruneReport,
    options: PerplexityOptions | None = None,
    progress: Progress = no_progress,
) -> QualityReport:
    """Compare the dense model, the same sparsity by magnitude, and the pruned model.

    Where the pruned model was itself pruned by magnitude there are two rows. The report is also written into
    the pruned directory, as perplexity.json.

    Args:
        model: the dense model.
        pruned: what `prune` wrote.
        report: what `prune` returned.
        options: text and context length.
        progress: called with a step's name and the share done.
    """
    options = options or PerplexityOptions()
    windows = _windows(model, options)
    method, pattern = report.options["method"], report.options["pattern"]
    label = pattern or f"{report.options['sparsity']:.0%}"
    names = {layer.name for layer in report.layers}

    def by_magnitude(name: str, weight: Tensor) -> Tensor:
        target = Pattern.parse(pattern) if pattern else report.options["sparsity"]
        return prune_weight(weight, target) if name in names else weight

    rows = [_measure(model, options, windows, "dense", None, progress)]
    if method != "magnitude":
        rows.append(_measure(model, options, windows, f"magnitude {label}", by_magnitude, progress))
    rows.append(_measure(pruned, options, windows, f"{method} {label}", None, progress))
    quality = QualityReport(
        text=windows.text,
        text_sha256=windows.text_sha256,
        context_tokens=options.context_tokens,
        windows=windows.tokens.shape[0],
        rows=rows,
    )
    write_json(pruned / PERPLEXITY_FILE, quality.to_json())
    return quality


def _windows(model: Path, options: PerplexityOptions) -> TokenWindows:
    return token_windows(
        model, options.text, sequences=options.windows, sequence_tokens=options.context_tokens
    )


def _measure(
    model: Path,
    options: PerplexityOptions,
    windows: TokenWindows,
    name: str,
    transform: Callable[[str, Tensor], Tensor] | None,
    progress: Progress,
) -> Perplexity:
    step = f"perplexity of {name}"
    progress(step, 0.0)
    with Checkpoint.open(model) as checkpoint:
        return _run(LayerwiseModel(checkpoint, options.device), windows, name, transform, progress)


def _run(
    runner: LayerwiseModel,
    windows: TokenWindows,
    name: str,
    transform: Callable[[str, Tensor], Tensor] | None,
    progress: Progress,
) -> Perplexity:
    step = f"perplexity of {name}"
    batches = windows.batches(_BATCH_TOKENS)
    hidden = runner.begin(batches)
    for layer in range(runner.num_layers):
        with runner.loaded_layer(layer):
            if transform is not None:
                for linear, module in runner.linears(layer).items():
                    weight = matrix_of(module)
                    weight.copy_(transform(linear, weight))
            for index, states in enumerate(hidden):
                hidden[index] = runner.run_layer(layer, states)
        # The output head takes about as long as a tenth of the layers of a small model.
        progress(step, 0.9 * (layer + 1) / runner.num_layers)
    total = 0.0
    with torch.inference_mode():
        for done, (batch, logits) in enumerate(zip(batches, runner.finish(batches, hidden), strict=True)):
            for window, scores in zip(batch, logits, strict=True):
                losses = cross_entropy(scores[:-1].float(), window[1:].to(scores.device), reduction="none")
                total += float(losses.double().sum())
            progress(step, 0.9 + 0.1 * (done + 1) / len(batches))
    predicted = windows.tokens.shape[0] * (windows.tokens.shape[1] - 1)
    nll = total / predicted
    return Perplexity(model=name, perplexity=_exp(nll), nll=nll, predicted_tokens=predicted)


def _exp(nll: float) -> float:
    """``exp``, infinite where it is beyond what a float holds: a model that is broken, not an error."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def write_plot(file: Path, report: PruneReport, quality: QualityReport | None = None) -> None:
    """Draw the sparsity of every pruned linear and, where measured, the perplexities; needs matplotlib.

    Args:
        file: what to write; its ending (.png, .svg, .pdf) says the type.
        report: what `prune` returned.
        quality: what `quality_report` returned.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 1 if quality is None else 2, squeeze=False, width_ratios=None)[0]
    kinds: dict[str, tuple[list[int], list[float]]] = {}
    for layer in report.layers:
        numbers = [int(part) for part in layer.name.split(".") if part.isdigit()]
        xs, ys = kinds.setdefault(layer.name.rpartition(".")[2], ([], []))
        xs.append(numbers[0] if numbers else 0)
        ys.append(layer.sparsity)
    for kind, (xs, ys) in kinds.items():
        axes[0].plot(xs, ys, marker=".", label=kind)
    axes[0].set(xlabel="decoder layer", ylabel="sparsity (counted)", ylim=(0, 1))
    axes[0].set_title(f"{report.options['method']}: {report.sparsity:.3f} over all pruned layers")
    axes[0].legend(fontsize="small", ncols=2)
    if quality is not None:
        axes[1].bar([row.model for row in quality.rows], [row.perplexity for row in quality.rows])
        axes[1].set(yscale="log", ylabel="perplexity")
        axes[1].set_title(f"{quality.text}, {quality.windows} windows of {quality.context_tokens} tokens")
    figure.savefig(file)
