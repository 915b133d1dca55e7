"""Prune a model directory, one decoder layer at a time.

For Wanda a layer's input is what the pruned layers before it make of the calibration text, as in its paper.
Each finished layer is written to a file of its own; at the end they are joined into shards like the source's.
"""

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from kernels_ext import bitmap_pack
from service.model.checkpoint import WEIGHT_DTYPES, Checkpoint, TensorEntry
from service.model.headers import read_header
from service.model.weights import drop_negative_zeros

from .calibration import CalibrationOptions, TokenWindows, recorded_norms, token_windows
from .layerwise import LayerwiseModel
from .methods import METHODS, Method, prune_weight, sparsity_of, zeros_per_row
from .pack import PackReport, packed_or_dense
from .progress import Progress, no_progress
from .writer import (
    PendingTensor,
    as_dense,
    as_packed,
    as_stored,
    new_directory,
    pending,
    refuse_existing,
    write_checkpoint,
    write_json,
    write_safetensors,
)

REPORT_FILE = "pruning.json"

# Tokens that go through a layer at once: enough for the matrix products to run at full speed, little enough
# that the widest activations of an 8B model (14336 float32 a token) stay at 120 MB.
_BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """How to prune.

    Attributes:
        method: "magnitude" or "wanda".
        sparsity: share of zeros in every output row, 0 to 1; rounded down to whole weights.
        skip: regular expression; linears whose name it matches anywhere stay as they are.
        output: "packed" (bitmap and non-zeros) or "dense" (ordinary safetensors with zeros).
        calibration: the text that Wanda's norms come from.
        device: where the arithmetic runs, "cpu" or "cuda".
    """

    method: Method = "wanda"
    sparsity: float = 0.5
    skip: str | None = None
    output: Literal["packed", "dense"] = "packed"
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.output not in ("packed", "dense"):
            raise ValueError(f"output is {self.output!r}, expected packed or dense")
        zeros_per_row(1, self.sparsity)
        if self.skip is not None:
            try:
                re.compile(self.skip)
            except re.error as error:
                raise ValueError(f"skip is {self.skip!r}, not a regular expression: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The options as JSON values."""
        value = dataclasses.asdict(self)
        value["calibration"]["text"] = self.calibration.text.name
        return value


@dataclass(frozen=True, kw_only=True)
class LinearReport:
    """One pruned linear. `format` is "bitmap" or "dense"; `reason` says why it isn't the one asked for."""

    name: str
    N: int
    K: int
    dtype: str
    sparsity: float
    format: str
    dense_bytes: int
    stored_bytes: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What was done.

    Attributes:
        options: as asked for.
        sparsity: share of zeros over all pruned layers, counted.
        dense_bytes, stored_bytes: of the pruned layers.
        layers: the pruned layers in the model's order.
        left_dense: matrices of decoder layers that were not pruned, with the reason.
        calibration: text, its SHA-256, sequences and tokens; None for magnitude.
        seconds: wall-clock time by step.
    """

    options: dict[str, Any]
    sparsity: float
    dense_bytes: int
    stored_bytes: int
    layers: list[LinearReport]
    left_dense: dict[str, str]
    calibration: dict[str, Any] | None
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return dataclasses.asdict(self)


def prune(model: Path, out: Path, options: PruneOptions, progress: Progress = no_progress) -> PruneReport:
    """Prune every linear of the decoder layers of `model` into a new directory `out`.

    Embeddings and the output head stay as they are. `out` keeps the shards, tokenizer and generation files of
    `model` and holds the report as pruning.json; it appears complete or not at all.

    Args:
        model: a Hugging Face directory with safetensors in float32, bfloat16 or float16.
        out: a directory that does not exist.
        options: what to do.
        progress: called with a step's name and the share done.

    Raises:
        CheckpointError: `model` cannot be read or run.
        FileExistsError: `out` exists.
        ValueError: an option does not fit: the calibration text is too short, `skip` leaves nothing.
    """
    refuse_existing(out)
    with Checkpoint.open(model) as checkpoint:
        return _prune(checkpoint, out, options, progress)


def _prune(checkpoint: Checkpoint, out: Path, options: PruneOptions, progress: Progress) -> PruneReport:
    runner = LayerwiseModel(checkpoint, options.device)
    chosen, left_dense = _choose(runner, checkpoint, options.skip)
    seconds: dict[str, float] = {}
    windows: TokenWindows | None = None
    if options.method == "wanda":
        windows = token_windows(
            checkpoint.path,
            options.calibration.text,
            sequences=options.calibration.sequences,
            sequence_tokens=options.calibration.sequence_tokens,
        )
    with new_directory(out) as directory:
        parts = directory / ".layers"
        parts.mkdir()
        step = f"prune ({options.method}, {options.sparsity:g})"
        begin = time.monotonic()
        layers = _prune_layers(
            runner, checkpoint, chosen, windows, options, parts, lambda f: progress(step, f)
        )
        seconds["prune"] = time.monotonic() - begin
        begin = time.monotonic()
        _join(checkpoint, directory, parts, options.output, lambda f: progress("write", f))
        seconds["write"] = time.monotonic() - begin
        total = sum(layer.N * layer.K for layer in layers)
        report = PruneReport(
            options=options.to_json(),
            sparsity=sum(layer.sparsity * layer.N * layer.K for layer in layers) / total,
            dense_bytes=sum(layer.dense_bytes for layer in layers),
            stored_bytes=sum(layer.stored_bytes for layer in layers),
            layers=layers,
            left_dense=left_dense,
            calibration=None if windows is None else _describe(windows),
            seconds=seconds,
        )
        write_json(directory / REPORT_FILE, report.to_json())
    return report


def _choose(
    runner: LayerwiseModel, checkpoint: Checkpoint, skip: str | None
) -> tuple[list[dict[str, nn.Linear]], dict[str, str]]:
    """The linears to prune, layer by layer, and the other matrices of decoder layers with the reason."""
    chosen: list[dict[str, nn.Linear]] = []
    left_dense: dict[str, str] = {}
    for layer in range(runner.num_layers):
        linears = runner.linears(layer)
        kept = {name for name in linears if skip is not None and re.search(skip, name)}
        left_dense |= dict.fromkeys(sorted(kept), f"matches skip {skip!r}")
        for name in linears:
            entry = checkpoint.entries[f"{name}.weight"]
            if name not in kept and entry.dtype not in WEIGHT_DTYPES:
                raise ValueError(
                    f"{checkpoint.path}: {entry.name} is {entry.dtype}; float32, bfloat16 and float16 "
                    "can be pruned"
                )
        prefix = runner.layer_key(layer)
        for name, entry in checkpoint.entries.items():
            module = name.removesuffix(".weight")
            if name.startswith(prefix) and module not in linears and len(entry.shape) > 1:
                left_dense[module] = "not a linear module of transformers' model"
        chosen.append({name: module for name, module in linears.items() if name not in kept})
    if not any(chosen):
        raise ValueError(
            f"{checkpoint.path}: no linear layer to prune: of the matrices in the decoder layers "
            + "; ".join(f"{name} {reason}" for name, reason in list(left_dense.items())[:3])
        )
    return chosen, left_dense


def _prune_layers(
    runner: LayerwiseModel,
    checkpoint: Checkpoint,
    chosen: list[dict[str, nn.Linear]],
    windows: TokenWindows | None,
    options: PruneOptions,
    parts: Path,
    progress: Any,
) -> list[LinearReport]:
    progress(0.0)
    hidden = [] if windows is None else runner.begin(windows.batches(_BATCH_TOKENS))
    reports: list[LinearReport] = []
    for layer, linears in enumerate(chosen):
        if windows is None:
            pruned = {name: _pruned(checkpoint, name, options, None) for name in linears}
        else:
            with runner.loaded_layer(layer):
                with recorded_norms(linears) as norms:
                    for states in hidden:
                        runner.run_layer(layer, states)
                pruned = {name: _pruned(checkpoint, name, options, norms[name].norms) for name in linears}
                for name, module in linears.items():
                    module.weight.copy_(pruned[name])
                if layer + 1 < len(chosen):
                    for index, states in enumerate(hidden):
                        hidden[index] = runner.run_layer(layer, states)
        entries: list[PendingTensor] = []
        for name, weight in pruned.items():
            report, stored = _stored(name, weight, options.output)
            reports.append(report)
            entries += stored
        write_safetensors(parts / f"{layer}.safetensors", entries)
        progress((layer + 1) / len(chosen))
    return reports


def _pruned(checkpoint: Checkpoint, name: str, options: PruneOptions, norms: Tensor | None) -> Tensor:
    weight = checkpoint.read(checkpoint.entries[f"{name}.weight"]).to(options.device)
    try:
        return prune_weight(weight, options.sparsity, norms).cpu()
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {name}: {error}") from error


def _stored(name: str, weight: Tensor, output: str) -> tuple[LinearReport, list[PendingTensor]]:
    """A pruned weight as it will lie on disk."""
    N, K = weight.shape
    dense_bytes = weight.nbytes
    drop_negative_zeros(weight)
    entries = [pending(f"{name}.weight", weight)]
    form, stored_bytes, reason = "dense", dense_bytes, ""
    if output == "packed":
        packed = bitmap_pack(weight)
        if packed.stored_bytes < dense_bytes:
            entries = as_packed(name, packed)
            form, stored_bytes = "bitmap", packed.stored_bytes
        else:
            reason = f"packed it would take {packed.stored_bytes} bytes"
    report = LinearReport(
        name=name,
        N=N,
        K=K,
        dtype=str(weight.dtype).removeprefix("torch."),
        sparsity=sparsity_of(weight),
        format=form,
        dense_bytes=dense_bytes,
        stored_bytes=stored_bytes,
        reason=reason,
    )
    return report, entries


def _join(checkpoint: Checkpoint, directory: Path, parts: Path, output: str, progress: Any) -> None:
    """Write the shards from the source's tensors and the finished layers, then drop the latter."""
    files = sorted(parts.iterdir())
    finished: dict[str, list[PendingTensor]] = {}
    with Checkpoint(parts, {}, {}) as layers:
        for entry in (entry for file in files for entry in read_header(file)):
            module = entry.name.rpartition(".")[0]
            finished.setdefault(f"{module}.weight", []).extend(as_stored(layers, entry))

        def tensors_of(name: str) -> list[PendingTensor]:
            if name in finished:
                return finished[name]
            entry = checkpoint.entries[name]
            if output == "packed" and not isinstance(entry, TensorEntry):
                return packed_or_dense(checkpoint, entry, PackReport())
            return [as_dense(checkpoint, entry)]

        write_checkpoint(checkpoint, directory, tensors_of, progress)
    for file in files:
        file.unlink()
    parts.rmdir()


def _describe(windows: TokenWindows) -> dict[str, Any]:
    sequences, tokens = windows.tokens.shape
    return {
        "text": windows.text,
        "text_sha256": windows.text_sha256,
        "sequences": sequences,
        "sequence_tokens": tokens,
    }
