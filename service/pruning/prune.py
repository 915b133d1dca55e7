"""Prune a model directory, one decoder layer at a time.

For Wanda and SparseGPT a layer's input is what the pruned layers before it make of the calibration text, as
in their papers. Each finished layer is written to a file of its own, with the next layer's input beside it,
so that an interrupted run goes on where it was; at the end the layers are joined into shards like the
source's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from kernels_ext import bitmap_pack
from service.model.checkpoint import Checkpoint, TensorEntry
from service.model.headers import read_header
from service.model.weights import drop_negative_zeros

from .calibration import CalibrationOptions, FeatureNorms, GramMatrix, TokenWindows, recorded, token_windows
from .layerwise import LayerwiseModel, is_transposed, matrix_of
from .methods import (
    METHODS,
    Method,
    Pattern,
    Target,
    outlier_share,
    owl_sparsities,
    prune_weight,
    sparsity_of,
    zeros_per_row,
)
from .pack import PackReport, packed_or_dense
from .progress import Progress, no_progress
from .sparsegpt import sparsegpt_prune
from .writer import (
    PendingTensor,
    as_dense,
    as_packed,
    as_stored,
    new_directory,
    pending,
    refuse_existing,
    work_directory,
    write_checkpoint,
    write_json,
    write_safetensors,
)

REPORT_FILE = "pruning.json"

# Tokens that go through a layer at once: enough for the matrix products to run at full speed, little enough
# that the widest activations of an 8B model (14336 float32 a token) stay at 120 MB.
_BATCH_TOKENS = 2048

_UNSEEN = "no calibration token reached it; give a longer calibration text"


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """How to prune.

    Attributes:
        method: "magnitude", "wanda" or "sparsegpt".
        sparsity: share of zeros, 0 to 1, rounded down to whole weights: of every output row, and with
            SparseGPT of every 128 columns. Not used with a pattern.
        pattern: "2:4" for at most 2 non-zeros in every 4 neighbours of a row, or None.
        skip: regular expression; linears whose name it matches anywhere stay as they are.
        per_layer: "owl" gives layers with many outliers less sparsity at the same mean; None all the same.
        output: "packed" (bitmap and non-zeros) or "dense" (ordinary safetensors with zeros).
        calibration: the text that Wanda and SparseGPT look at.
        device: where the arithmetic runs, "cpu" or "cuda".
    """

    method: Method = "wanda"
    sparsity: float = 0.5
    pattern: str | None = None
    skip: str | None = None
    per_layer: Literal["owl"] | None = None
    output: Literal["packed", "dense"] = "packed"
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.output not in ("packed", "dense"):
            raise ValueError(f"output is {self.output!r}, expected packed or dense")
        if self.per_layer not in (None, "owl"):
            raise ValueError(f"per_layer is {self.per_layer!r}, expected owl")
        if self.per_layer is not None and self.pattern is not None:
            raise ValueError(f"per_layer {self.per_layer} needs a sparsity; a pattern is the same everywhere")
        zeros_per_row(1, self.sparsity)
        if self.pattern is not None:
            Pattern.parse(self.pattern)
        if self.skip is not None:
            try:
                re.compile(self.skip)
            except re.error as error:
                raise ValueError(f"skip is {self.skip!r}, not a regular expression: {error}") from error

    @property
    def needs_calibration(self) -> bool:
        """Whether a text has to go through the model."""
        return self.method != "magnitude" or self.per_layer is not None

    def target(self, sparsity: float | None = None) -> Target:
        """How many weights go; `sparsity` is a layer's own where layers differ."""
        if self.pattern is not None:
            return Pattern.parse(self.pattern)
        return self.sparsity if sparsity is None else sparsity

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
        layer_sparsities: what each decoder layer was given by OWL, or None.
    """

    options: dict[str, Any]
    sparsity: float
    dense_bytes: int
    stored_bytes: int
    layers: list[LinearReport]
    left_dense: dict[str, str]
    calibration: dict[str, Any] | None
    seconds: dict[str, float]
    layer_sparsities: list[float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return dataclasses.asdict(self)


def prune(model: Path, out: Path, options: PruneOptions, progress: Progress = no_progress) -> PruneReport:
    """Prune every linear of the decoder layers of `model` into a new directory `out`.

    Embeddings and the output head stay as they are. `out` keeps the shards, tokenizer and generation files of
    `model` and holds the report as pruning.json; it appears complete or not at all. What an interrupted run
    has done lies in `.OUT.unfinished` beside it: the same call goes on from there, to the same bytes.

    Args:
        model: a Hugging Face directory with safetensors in float32, bfloat16 or float16.
        out: a directory that does not exist.
        options: what to do.
        progress: called with a step's name and the share done.

    Raises:
        CheckpointError: `model` cannot be read or run.
        FileExistsError: `out` exists.
        ValueError: an option does not fit: the calibration text is too short, `skip` leaves nothing; or an
            interrupted run with other options is in the way.
    """
    refuse_existing(out)
    with Checkpoint.open(model) as checkpoint:
        return _prune(checkpoint, out, options, progress)


def _prune(checkpoint: Checkpoint, out: Path, options: PruneOptions, progress: Progress) -> PruneReport:
    runner = LayerwiseModel(checkpoint, options.device)
    chosen, left_dense = _choose(runner, checkpoint, options)
    seconds: dict[str, float] = {}
    windows: TokenWindows | None = None
    if options.needs_calibration:
        windows = token_windows(
            checkpoint.path,
            options.calibration.text,
            sequences=options.calibration.sequences,
            sequence_tokens=options.calibration.sequence_tokens,
        )
    with work_directory(out, _fingerprint(checkpoint, options, windows)) as work:
        step = f"prune ({options.method}, {options.target()})"
        begin = time.monotonic()
        run = _Run(runner, checkpoint, chosen, windows, options, work)
        sparsities = run.owl(lambda f: progress("outliers", f)) if options.per_layer else None
        layers = run.prune(sparsities, lambda f: progress(step, f))
        seconds["prune"] = time.monotonic() - begin
        pruned = {layer.name for layer in layers}
        left_dense |= {name: _UNSEEN for linears in chosen for name in linears if name not in pruned}
        if not layers:
            raise ValueError(f"{checkpoint.path}: no linear layer was pruned: {_UNSEEN}")
        begin = time.monotonic()
        with new_directory(out) as directory:
            _join(checkpoint, directory, work, len(chosen), options.output, lambda f: progress("write", f))
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
                layer_sparsities=sparsities,
            )
            write_json(directory / REPORT_FILE, report.to_json())
    return report


def _fingerprint(
    checkpoint: Checkpoint, options: PruneOptions, windows: TokenWindows | None
) -> dict[str, Any]:
    """What the work on a layer depends on."""
    files = sorted({entry.file for entry in checkpoint.entries.values()} | {checkpoint.config_file})
    return {
        "options": options.to_json(),
        "calibration": None if windows is None else _describe(windows),
        "model": str(checkpoint.path.resolve()),
        "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
    }


def _choose(
    runner: LayerwiseModel, checkpoint: Checkpoint, options: PruneOptions
) -> tuple[list[dict[str, nn.Module]], dict[str, str]]:
    """The linears to prune, layer by layer, and the other matrices of decoder layers with the reason."""
    skip = options.skip
    chosen: list[dict[str, nn.Module]] = []
    left_dense: dict[str, str] = {}
    for layer in range(runner.num_layers):
        linears = runner.linears(layer)
        kept = {name for name in linears if skip is not None and re.search(skip, name)}
        left_dense |= dict.fromkeys(sorted(kept), f"matches skip {skip!r}")
        for name, module in linears.items():
            entry = checkpoint.find(f"{name}.weight", tuple(module.weight.shape))  # type: ignore[arg-type]
            K = matrix_of(module).shape[1]
            target = options.target()
            if isinstance(target, Pattern) and name not in kept and K % target.group:
                raise ValueError(
                    f"{checkpoint.path}: {entry.name} has {K} input features, expected a multiple of "
                    f"{target.group} for the pattern {target}; leave it with --skip"
                )
        prefix = runner.layer_key(layer)
        for name, entry in checkpoint.entries.items():
            module_name = name.removesuffix(".weight")
            if name.startswith(prefix) and module_name not in linears and len(entry.shape) > 1:
                left_dense[module_name] = "not a linear module of transformers' model"
        chosen.append({name: module for name, module in linears.items() if name not in kept})
    if not any(chosen):
        raise ValueError(
            f"{checkpoint.path}: no linear layer to prune: of the matrices in the decoder layers "
            + "; ".join(f"{name} {reason}" for name, reason in list(left_dense.items())[:3])
        )
    return chosen, left_dense


@dataclass(frozen=True)
class _Run:
    """The work on the layers: what it reads, and the directory that holds what is finished.

    For layer L there are ``L.safetensors`` (its pruned weights), ``L.json`` (their reports, written last: the
    layer is finished once it is there) and, until it is finished, ``hidden-L.safetensors``, its input.
    """

    runner: LayerwiseModel
    checkpoint: Checkpoint
    chosen: list[dict[str, nn.Module]]
    windows: TokenWindows | None
    options: PruneOptions
    work: Path

    def prune(self, sparsities: list[float] | None, progress: Callable[[float], None]) -> list[LinearReport]:
        """Prune every layer that is not finished; returns the reports of all."""
        reports: list[LinearReport] = []
        count = len(self.chosen)
        done = next((L for L in range(count) if not (self.work / f"{L}.json").exists()), count)
        for L in range(done):
            values = json.loads((self.work / f"{L}.json").read_text(encoding="utf-8"))
            reports += [LinearReport(**value) for value in values["layers"]]
        progress(done / count)
        calibrated = self.windows is not None and self.options.method != "magnitude"
        hidden: list[Tensor] = []
        if calibrated and done < count:
            assert self.windows is not None
            # Also when the work goes on: a pass records what the layers are called with.
            hidden = self.runner.begin(self.windows.batches(_BATCH_TOKENS))
            if done:
                hidden = self._load_hidden(done, hidden)
        for L in range(done, count):
            target = self.options.target(None if sparsities is None else sparsities[L])
            linears = self.chosen[L]
            if calibrated:
                pruned = self._calibrated(L, linears, target, hidden)
            else:
                pruned = {
                    name: self._pruned(name, module, functools.partial(prune_weight, target=target))
                    for name, module in linears.items()
                }
            reports += self._finish(L, pruned, hidden)
            progress((L + 1) / count)
        return reports

    def owl(self, progress: Callable[[float], None]) -> list[float]:
        """Sparsity of each layer by its share of outliers in the dense model."""
        file = self.work / "owl.json"
        if file.exists():
            found: list[float] = json.loads(file.read_text(encoding="utf-8"))["sparsities"]
            return found
        assert self.windows is not None
        hidden = self.runner.begin(self.windows.batches(_BATCH_TOKENS))
        shares = []
        for L, linears in enumerate(self.chosen):
            progress(L / len(self.chosen))
            with self.runner.loaded_layer(L), recorded(linears, FeatureNorms) as norms:
                for index, states in enumerate(hidden):
                    hidden[index] = self.runner.run_layer(L, states)
                counts = [
                    outlier_share(matrix_of(module), norms[name].norms)
                    for name, module in linears.items()
                    if norms[name].seen
                ]
            shares.append(sum(n for n, _ in counts) / max(1, sum(size for _, size in counts)))
        progress(1.0)
        sparsities = owl_sparsities(shares, self.options.sparsity)
        _write_whole(file, lambda target: write_json(target, {"sparsities": sparsities}))
        return sparsities

    def _calibrated(
        self, L: int, linears: dict[str, nn.Module], target: Target, hidden: list[Tensor]
    ) -> dict[str, Tensor]:
        """Prune a layer by its inputs, then replace `hidden` by what the pruned layer makes of it."""
        runner = self.runner
        with runner.loaded_layer(L):
            if self.options.method == "wanda":
                with recorded(linears, FeatureNorms) as norms:
                    for states in hidden:
                        runner.run_layer(L, states)
                pruned = {
                    name: self._pruned(
                        name,
                        module,
                        functools.partial(prune_weight, target=target, feature_norms=norms[name].norms),
                    )
                    for name, module in linears.items()
                    if norms[name].seen
                }
            else:
                with recorded(linears, GramMatrix) as grams:
                    for states in hidden:
                        runner.run_layer(L, states)
                pruned = {
                    name: self._pruned(
                        name,
                        module,
                        functools.partial(sparsegpt_prune, inputs=grams[name].factor, target=target),
                    )
                    for name, module in linears.items()
                    if grams[name].seen
                }
            for name, weight in pruned.items():
                matrix_of(linears[name]).copy_(weight)
            if len(self.chosen) > L + 1:
                for index, states in enumerate(hidden):
                    hidden[index] = runner.run_layer(L, states)
        return pruned

    def _pruned(self, name: str, module: nn.Module, how: Callable[[Tensor], Tensor]) -> Tensor:
        """A pruned weight as ``[N, K]`` on the CPU, in the type that the checkpoint has."""
        weight = self.checkpoint.read(self.checkpoint.entries[f"{name}.weight"]).to(self.options.device)
        try:
            return how(weight.T.contiguous() if is_transposed(module) else weight).cpu()
        except ValueError as error:
            raise ValueError(f"{self.checkpoint.path}: {name}: {error}") from error

    def _finish(self, L: int, pruned: dict[str, Tensor], hidden: list[Tensor]) -> list[LinearReport]:
        """Write a layer's files, in an order that leaves it unfinished or finished whenever it is cut off."""
        reports, tensors = [], []
        for name, weight in pruned.items():
            transposed = is_transposed(self.chosen[L][name])
            report, stored = _stored(name, weight, self.options.output, transposed)
            reports.append(report)
            tensors += stored
        if hidden and len(self.chosen) > L + 1:
            states = [pending(str(index), tensor.cpu()) for index, tensor in enumerate(hidden)]
            _write_whole(
                self.work / f"hidden-{L + 1}.safetensors", lambda file: write_safetensors(file, states)
            )
        _write_whole(self.work / f"{L}.safetensors", lambda file: write_safetensors(file, tensors))
        values = {"layers": [dataclasses.asdict(report) for report in reports]}
        _write_whole(self.work / f"{L}.json", lambda file: write_json(file, values))
        (self.work / f"hidden-{L}.safetensors").unlink(missing_ok=True)
        return reports

    def _load_hidden(self, L: int, like: list[Tensor]) -> list[Tensor]:
        file = self.work / f"hidden-{L}.safetensors"
        with Checkpoint(self.work, {}, {}) as reader:
            saved = {int(entry.name): reader.read_small(entry) for entry in read_header(file)}
        return [saved[index].to(tensor.device) for index, tensor in enumerate(like)]


def _write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Let a file appear complete or not at all."""
    temporary = file.with_suffix(".partial")
    write(temporary)
    temporary.replace(file)


def _stored(
    name: str, weight: Tensor, output: str, transposed: bool
) -> tuple[LinearReport, list[PendingTensor]]:
    """A pruned ``[N, K]`` weight as it will lie on disk: as the source has it, so GPT-2's as ``[K, N]``."""
    N, K = weight.shape
    if transposed:
        weight = weight.T.contiguous()
    dense_bytes = weight.nbytes
    drop_negative_zeros(weight)
    tensors = [pending(f"{name}.weight", weight)]
    form, stored_bytes, reason = "dense", dense_bytes, ""
    if output == "packed":
        packed = bitmap_pack(weight)
        if packed.stored_bytes < dense_bytes:
            tensors = as_packed(name, packed)
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
    return report, tensors


def _join(
    checkpoint: Checkpoint,
    directory: Path,
    work: Path,
    count: int,
    output: str,
    progress: Callable[[float], None],
) -> None:
    """Write the shards from the source's tensors and the finished layers."""
    finished: dict[str, list[PendingTensor]] = {}
    with Checkpoint(work, {}, {}) as layers:
        for entry in (entry for L in range(count) for entry in read_header(work / f"{L}.safetensors")):
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


def _describe(windows: TokenWindows) -> dict[str, Any]:
    sequences, tokens = windows.tokens.shape
    return {
        "text": windows.text,
        "text_sha256": windows.text_sha256,
        "sequences": sequences,
        "sequence_tokens": tokens,
    }
