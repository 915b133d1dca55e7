"""What a checkpoint would look like in memory, without running or keeping it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.errors import CheckpointError, StartupError

from .checkpoint import WEIGHT_DTYPES, Checkpoint
from .decoder import IGNORED_TENSORS, make_plan, unsupported
from .interface import LayerReport
from .linear import TIED_HEAD, choose_format, describe
from .loader import make_spec, read_config, resolve_dtype
from .transformers_model import (
    build_empty,
    convert,
    expert_report,
    ignored_patterns,
    is_linear,
    linear_plan,
    map_names,
    resolve_ties,
    take_expert_plans,
    why_not_served,
)
from .weights import LinearPlan, Progress, WeightReader


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint's linear layers and their sizes.

    Attributes:
        path: the directory.
        architecture: the model class that the configuration names.
        implementation: "native" or "transformers", or "" where the model cannot be served.
        dtype: the dtype it would be served in.
        layers: every linear layer as it would be stored; where the model cannot be served, every matrix of
            the checkpoint.
        dense_bytes, stored_bytes: of these layers.
        other_bytes: everything else: embeddings, norms, biases.
        reason: why it runs through transformers, or "".
        problem: why it cannot be served, or None.
    """

    path: Path
    architecture: str
    implementation: str
    dtype: str
    layers: list[LayerReport]
    dense_bytes: int
    stored_bytes: int
    other_bytes: int
    reason: str
    problem: str | None


def inspect_checkpoint(
    path: str | Path, *, device: str = "cpu", dtype: str = "auto", progress: Progress | None = None
) -> Inspection:
    """Read a checkpoint through once and report on each linear layer as `load_model` would store it.

    Args:
        path: a Hugging Face directory, plain or packed.
        device: the device whose dispatch table the backends come from.
        dtype: as in `load_model`.
        progress: told a stage and the share of it that is done (0..1).

    Raises:
        CheckpointError: a file is missing, truncated or inconsistent. A sound checkpoint of a model that
            cannot be served is no error: `Inspection.problem` says why.
        SettingsError: ``dtype`` is none of those that are served.
    """
    with Checkpoint.open(path) as checkpoint:
        config = read_config(checkpoint)
        served_dtype = resolve_dtype(checkpoint, config, dtype)
        reader = WeightReader(checkpoint, dtype=served_dtype, device=torch.device(device), progress=progress)
        reason = unsupported(config)
        problem = None
        if reason is None:
            layers = _native_layers(config, checkpoint, reader)
        else:
            try:
                problem = why_not_served(config, None)
                # The sizes must hold for a forward pass as well as for the weights.
                make_spec(checkpoint, config, served_dtype, torch.device(device), None, native=False)
                layers = list(_transformers_layers(config, checkpoint, reader))
            except CheckpointError:
                raise
            except StartupError as error:
                problem = problem or error.message
                layers = list(_matrices(checkpoint, reader))
        other = _other_bytes(checkpoint, served_dtype, layers)
        return Inspection(
            path=checkpoint.path,
            architecture=(config.architectures or [config.model_type])[0],
            implementation="" if problem else "transformers" if reason else "native",
            dtype=str(served_dtype).removeprefix("torch."),
            layers=layers,
            dense_bytes=sum(layer.dense_bytes for layer in layers),
            stored_bytes=sum(layer.stored_bytes for layer in layers),
            other_bytes=other,
            reason=reason or "",
            problem=problem,
        )


def _native_layers(config: Any, checkpoint: Checkpoint, reader: WeightReader) -> list[LayerReport]:
    plan = make_plan(config, checkpoint)
    layers = [reader.inspect(linear) for linear in plan.linears()]
    for name, shape in plan.others(config):
        checkpoint.find(name, shape)
        reader.mark_used(name)
    if plan.head is None:
        layers.append(_tied(reader, "lm_head", plan.embedding))
    reader.check_all_used((*IGNORED_TENSORS, r"^lm_head\.weight$"))
    return layers


def _transformers_layers(config: Any, checkpoint: Checkpoint, reader: WeightReader) -> list[LayerReport]:
    model = build_empty(config, reader.dtype)
    names = map_names(model, checkpoint)
    resolve_ties(names, reader)
    experts, whole_experts = take_expert_plans(model, names)
    converted: dict[str, tuple[tuple[int, ...], int]] = {}
    for first, conversion in names.conversions.items():
        for target, tensor in convert(model, first, conversion, reader):
            converted[target] = tuple(tensor.shape), int(torch.count_nonzero(tensor))
    experts_at = {plan.path: plan for plan in experts}
    layers = []
    for path, module in model.named_modules():
        if path in experts_at:
            # As `Experts` holds them: every expert's gate and up, then every expert's down.
            gate_up, down = zip(*experts_at[path].linears(), strict=True)
            layers += [reader.inspect(linear) for linear in (*gate_up, *down)]
        if not is_linear(module):
            continue
        weight = f"{path}.weight"
        plan = linear_plan(path, module, names)
        if weight in names.tied and names.tied[weight] in names.direct:
            layers.append(_tied(reader, path, names.direct[names.tied[weight]]))
        elif plan is not None:
            layers.append(reader.inspect(plan))
        elif weight in converted:
            (N, K), nnz = converted[weight]
            stored = choose_format(N, K, reader.dtype, nnz, device=reader.device.type)
            layers.append(describe(path, N, K, reader.dtype, nnz, stored, device=reader.device.type))
        else:
            checkpoint.find(weight, tuple(model.get_parameter(weight).shape))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and name in converted:
            reason = whole_experts[name.rpartition(".")[0]]
            layers.append(expert_report(name, *converted[name], reader.dtype, reason))
    for target, source in names.direct.items():
        entry = checkpoint.entries[source]
        wanted = tuple(model.state_dict()[target].shape)
        if entry.dtype in WEIGHT_DTYPES:
            checkpoint.find(source, wanted)
        reader.mark_used(source)
    reader.check_all_used(ignored_patterns(model))
    return layers


def _tied(reader: WeightReader, name: str, embedding: str) -> LayerReport:
    entry = reader.checkpoint.entries[embedding]
    N, K = entry.shape
    nnz = reader.count_nonzero(entry)
    return describe(name, N, K, reader.dtype, nnz, TIED_HEAD, device=reader.device.type)


def _matrices(checkpoint: Checkpoint, reader: WeightReader) -> Iterator[LayerReport]:
    """Every matrix of a checkpoint that no model code here can place."""
    for name, entry in checkpoint.entries.items():
        if len(entry.shape) == 2 and entry.dtype in WEIGHT_DTYPES:
            yield reader.inspect(
                LinearPlan(name.removesuffix(".weight"), ((name, entry.shape[0]),), entry.shape[1])
            )


def _other_bytes(checkpoint: Checkpoint, dtype: torch.dtype, layers: list[LayerReport]) -> int:
    """Bytes of everything that is in no layer, each tensor counted once in the served dtype."""
    elements = sum(
        math.prod(entry.shape) for entry in checkpoint.entries.values() if entry.dtype in WEIGHT_DTYPES
    )
    in_layers = sum(layer.N * layer.K for layer in layers)
    return max(0, elements - in_layers) * dtype.itemsize
