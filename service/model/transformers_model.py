"""Any causal LM through transformers' own modelling code, with its linears and its attention replaced.

Slower than the native decoder and correct for far more architectures. A model is served only after a check at
load: the paged forward of a few tokens must give the logits that transformers' own attention gives.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import local_torch_dtype
from transformers.pytorch_utils import Conv1D

from service.errors import CheckpointError, StartupError

from .attention import (
    PAGED_ATTENTION,
    PagedStep,
    allocate_kv_cache,
    kv_bytes_per_block,
    register,
    running_step,
)
from .checkpoint import Checkpoint, TensorEntry, fault, matrix_shape
from .experts import Experts, ExpertsPlan, apply_gate_of, expert_modules, plan_experts
from .interface import ForwardBatch, KvCache, LayerReport, ModelSpec
from .linear import TIED_HEAD, SparseLinear
from .weights import LinearPlan, WeightReader

_log = logging.getLogger("lacunar.model")

_PROBE_TOKENS = 8
# How far the two attention codes may be apart, relative to the largest logit: rounding of a few layers.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
_EXPERTS = "experts are one 3-D parameter, which transformers' own code multiplies"


def build_empty(config: Any, dtype: torch.dtype) -> Any:
    """Make the model that a configuration describes with every tensor on the meta device, attention replaced.

    Raises:
        StartupError: transformers has no causal LM for it without remote code, or it takes no positions.
    """
    register()
    name = (config.architectures or [config.model_type])[0]
    try:
        with torch.device("meta"), local_torch_dtype(dtype, name):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=PAGED_ATTENTION, trust_remote_code=False
            )
    except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
        raise StartupError(f"{name}: transformers cannot build it as a causal LM: {error}") from error
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise StartupError(
            f"{name} cannot be served: its code takes no position_ids, so tokens of several sequences cannot "
            "be run together"
        )
    return model


def why_not_served(config: Any, max_model_len: int | None) -> str | None:
    """Say why the attention of a configuration is beyond the paged cache; None if nothing speaks against it.

    What a configuration cannot tell is found by the check at load.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
        "attention",
    }
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))} need state other than keys and values"
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and (max_model_len is None or max_model_len > chunk):
        return (
            f"attention in chunks of {chunk} tokens is not implemented; max_model_len up to {chunk} would do"
        )
    if getattr(text, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    return None


@dataclass
class Conversion:
    """Tensors of the checkpoint that transformers merges or splits on loading."""

    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class NameMap:
    """Where each parameter of the model comes from.

    Attributes:
        direct: parameter -> the checkpoint's name.
        conversions: first target parameter -> the conversion that makes it, and perhaps others.
        tied: parameter -> the parameter whose tensor it shares.
    """

    direct: dict[str, str] = field(default_factory=dict)
    conversions: dict[str, Conversion] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


def map_names(model: Any, checkpoint: Checkpoint) -> NameMap:
    """Match the checkpoint's names to the model's by transformers' own rules."""
    names = NameMap(tied=dict(model.all_tied_weights_keys))
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    for source in sorted(checkpoint.entries, key=dot_natural_key):
        target, pattern = rename_source_key(source, renamings, converters, prefix, state)
        if target not in state and source in state:
            target, pattern = rename_source_key(source, [], [], prefix, state)
        if target not in state:
            continue
        if pattern is None:
            names.direct[target] = source
        else:
            conversion = names.conversions.setdefault(target, Conversion(copy.deepcopy(by_pattern[pattern])))
            conversion.sources.append((source, pattern))
    return names


def linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that multiplies by a weight matrix, with its path."""
    for path, module in model.named_modules():
        if is_linear(module):
            yield path, module


def is_linear(module: nn.Module) -> bool:
    """Whether a module of transformers multiplies by a weight matrix."""
    return isinstance(module, (nn.Linear, Conv1D))


def linear_plan(path: str, module: nn.Module, names: NameMap) -> LinearPlan | None:
    """Lay out a linear module whose tensors are stored one to one; None for a tied or converted one."""
    weight, bias = names.direct.get(f"{path}.weight"), names.direct.get(f"{path}.bias")
    has_bias = getattr(module, "bias", None) is not None
    if weight is None or f"{path}.weight" in names.tied or (has_bias and bias is None):
        return None
    shape = _weight_shape(module)
    transposed = isinstance(module, Conv1D)
    K, N = shape if transposed else shape[::-1]
    return LinearPlan(path, ((weight, N),), K, (bias,) if has_bias and bias else (), transposed)


def resolve_ties(names: NameMap, reader: WeightReader) -> None:
    """Decide about parameters that the code ties, by what the checkpoint has: one, the other, or both."""
    for target, source in list(names.tied.items()):
        if target not in names.direct:
            continue
        if source not in names.direct:
            names.direct[source] = names.direct.pop(target)
        elif _same_values(reader, names.direct[target], names.direct[source]):
            reader.mark_used(names.direct.pop(target))
        else:
            _log.warning(
                "the configuration ties %s to %s, but the checkpoint has different values for both: not tied",
                target,
                source,
            )
            del names.tied[target]


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)


class TransformersDecoder:
    """A causal LM run by transformers over the paged cache. See `CausalModel` for the contract."""

    def __init__(self, spec: ModelSpec, model: Any, reader: WeightReader) -> None:
        """Fill ``model`` (from `build_empty`) with the checkpoint's weights and check it.

        Raises:
            CheckpointError: a tensor is missing, inconsistent or unknown.
            StartupError: the architecture's attention is not what the paged kernel computes.
        """
        self.spec = spec
        self._model = model
        self._linears: list[SparseLinear] = []
        # Experts that stay 3-D parameters, and why.
        self._whole_experts: dict[str, str] = {}
        self._takes_indices = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._fill(reader)
        model.eval()
        self._check_attention()
        for linear in self._linears:
            linear.reset_calls()

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Make an empty cache on the model's device, in the model's dtype."""
        return allocate_kv_cache(self.spec, num_blocks, block_size)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block takes over all layers."""
        return kv_bytes_per_block(self.spec, block_size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Run one step and write its keys and values; returns logits ``[L, vocab_size]`` float32."""
        with running_step(PagedStep(batch, kv_cache)):
            return self._logits(batch.token_ids, batch.positions, batch.logits_indices)

    def layer_reports(self) -> list[LayerReport]:
        """Describe every linear layer, in the model's order, and the experts that stay 3-D parameters."""
        experts = [
            expert_report(
                name,
                tuple(parameter.shape),
                int(torch.count_nonzero(parameter)),
                parameter.dtype,
                self._whole_experts.get(name.rpartition(".")[0], ""),
            )
            for name, parameter in self._model.named_parameters()
            if parameter.dim() == 3
        ]
        return [linear.report() for linear in self._linears] + experts

    def linear_calls(self) -> dict[str, int]:
        """Calls since load by "backend|m_bucket"."""
        total: Counter[str] = Counter()
        for linear in self._linears:
            total.update(linear.calls())
        return dict(total)

    def _logits(self, token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        # No cache is passed: attention gets this step's keys and values alone and finds the rest itself.
        extra = {"logits_to_keep": wanted} if self._takes_indices else {}
        output = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **extra
        )
        logits: Tensor = output.logits[0]
        if not self._takes_indices:
            logits = logits.index_select(0, wanted)
        return logits.to(torch.float32)

    def _fill(self, reader: WeightReader) -> None:
        model = self._model
        names = map_names(model, reader.checkpoint)
        resolve_ties(names, reader)
        dtypes = _DtypePlan(model, self.spec.dtype)
        _materialise_buffers(model, self.spec.device)
        all_experts, self._whole_experts = take_expert_plans(model, names)
        for experts in all_experts:
            dtype = dtypes.of(experts.parameters[0])
            pairs = [[reader.linear(linear, dtype) for linear in expert] for expert in experts.linears()]
            gate_up, down = zip(*pairs, strict=True)
            gate = apply_gate_of(model.get_submodule(experts.path))
            self._replace(experts.path, Experts(gate_up, down, gate))
        modules = dict(linear_modules(model))
        # Converted tensors: a linear's weight is packed at once, the rest waits for its turn below.
        converted: dict[str, Tensor] = {}
        packed: dict[str, SparseLinear] = {}
        for first, conversion in names.conversions.items():
            for target, tensor in convert(model, first, conversion, reader):
                path = target.removesuffix(".weight")
                if path != target and path in modules:
                    packed[path] = self._place_converted(
                        path, modules[path], tensor, reader, dtypes.of(target)
                    )
                else:
                    converted[target] = tensor
        for path, module in modules.items():
            if f"{path}.weight" in names.tied:
                continue
            dtype = dtypes.of(f"{path}.weight")
            plan = linear_plan(path, module, names)
            if plan is not None:
                self._replace(path, reader.linear(plan, dtype))
                continue
            if path not in packed:
                weight = self._take(f"{path}.weight", module.weight, names, converted, reader, dtype)
                packed[path] = self._place_converted(path, module, weight, reader, dtype)
            linear = packed.pop(path)
            bias = self._bias(path, module, names, converted, reader, dtype)
            self._replace(path, SparseLinear(path, linear.weight, bias, linear.stored, linear.nnz))
        for name, tensor in list(model.named_parameters()) + list(_persistent_buffers(model)):
            if (
                tensor.device.type == "meta"
                and name not in names.tied
                and name.rpartition(".")[0] not in modules
            ):
                value = self._take(name, tensor, names, converted, reader, dtypes.of(name))
                _assign(model, name, value, isinstance(tensor, nn.Parameter))
        for name, source_name in names.tied.items():
            source = model.get_parameter(source_name).detach()
            path = name.removesuffix(".weight")
            if path in modules:
                bias = self._bias(path, modules[path], names, converted, reader, source.dtype)
                self._replace(path, SparseLinear(path, source, bias, TIED_HEAD))
            else:
                _assign(model, name, source, True)
        reader.check_all_used(ignored_patterns(model))
        # The order of the model, tied head included.
        self._linears = [module for module in model.modules() if isinstance(module, SparseLinear)]

    def _place_converted(
        self, path: str, module: nn.Module, weight: Tensor, reader: WeightReader, dtype: torch.dtype
    ) -> SparseLinear:
        """Store a weight that did not come straight from one tensor; the bias comes later."""
        wanted = _weight_shape(module)
        if tuple(weight.shape) != wanted:
            raise fault(
                reader.checkpoint.path,
                f"{path}.weight",
                f"shape {list(wanted)}",
                f"shape {list(weight.shape)}",
            )
        weight = weight.to(dtype)
        return reader.place(path, (weight.T if isinstance(module, Conv1D) else weight).contiguous(), None)

    def _bias(
        self,
        path: str,
        module: nn.Module,
        names: NameMap,
        converted: dict[str, Tensor],
        reader: WeightReader,
        dtype: torch.dtype,
    ) -> Tensor | None:
        if getattr(module, "bias", None) is None:
            return None
        return self._take(f"{path}.bias", module.bias, names, converted, reader, dtype)

    def _take(
        self,
        name: str,
        like: Any,
        names: NameMap,
        converted: dict[str, Tensor],
        reader: WeightReader,
        dtype: torch.dtype,
    ) -> Tensor:
        shape = tuple(like.shape)
        if name in names.direct:
            if not like.dtype.is_floating_point:
                return _read_exact(reader, names.direct[name], shape, like.dtype)
            return reader.tensor(names.direct[name], shape, dtype)
        tensor = converted.pop(name, None)
        if tensor is None:
            raise fault(reader.checkpoint.path, name, f"a tensor of shape {list(shape)}", "none")
        if tuple(tensor.shape) != shape:
            raise fault(reader.checkpoint.path, name, f"shape {list(shape)}", f"shape {list(tensor.shape)}")
        return tensor.to(dtype).contiguous()

    def _replace(self, path: str, module: nn.Module) -> None:
        parent, _, leaf = path.rpartition(".")
        setattr(self._model.get_submodule(parent), leaf, module)

    @torch.inference_mode()
    def _check_attention(self) -> None:
        """Compare the paged forward of a few tokens, in two steps, with transformers' own eager attention."""
        spec, model = self.spec, self._model
        name = type(model).__name__
        count = min(_PROBE_TOKENS, spec.max_model_len)
        tokens = (torch.arange(count, device=spec.device) * 7 + 3) % spec.vocab_size
        positions = torch.arange(count, device=spec.device)
        cache = self.allocate_kv_cache(2, count)
        windows: dict[int, int | None] = {}
        parts = []
        for start, end in ((0, count // 2), (count // 2, count)):
            if start == end:
                continue
            batch = _single_sequence(tokens[start:end], positions[start:end], count)
            with running_step(PagedStep(batch, cache)) as step:
                try:
                    parts.append(self._logits(batch.token_ids, batch.positions, batch.logits_indices))
                except (ValueError, TypeError, AttributeError, RuntimeError) as error:
                    raise StartupError(f"{name} cannot be served: {error}") from error
            windows = step.windows
        if sorted(windows) != list(range(spec.num_layers)):
            raise StartupError(
                f"{name} cannot be served: {len(windows)} of its {spec.num_layers} layers call transformers' "
                "attention interface; the others keep state that the paged cache does not hold"
            )
        self._check_windows(name, windows)
        ours = torch.cat(parts)
        model.set_attn_implementation("eager")
        theirs = self._logits(tokens, positions, positions)
        model.set_attn_implementation(PAGED_ATTENTION)
        scale = float(theirs.abs().max())
        apart = float((ours - theirs).abs().max())
        if not apart <= _PROBE_TOLERANCE[spec.dtype] * max(scale, 1.0):
            raise StartupError(
                f"{name} cannot be served: the logits of {count} tokens through paged attention differ from "
                f"transformers' own by {apart:.3g} (largest logit {scale:.3g})"
            )

    def _check_windows(self, name: str, windows: dict[int, int | None]) -> None:
        text = self._model.config.get_text_config()
        window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
        if window is None or kinds is None or self.spec.max_model_len <= window:
            return
        for layer, found in windows.items():
            wanted = window if kinds[layer] == "sliding_attention" else None
            if found != wanted:
                raise StartupError(
                    f"{name} cannot be served: layer {layer} should see {wanted or 'all'} tokens, but its "
                    f"code asks for {found or 'all'}; max_model_len up to {window} would do"
                )


def take_expert_plans(model: nn.Module, names: NameMap) -> tuple[list[ExpertsPlan], dict[str, str]]:
    """Lay out the experts that get a linear each, and take their tensors out of `names`.

    Returns:
        The plans, and of the other experts modules the path and the reason.
    """
    plans, whole = [], {}
    for path, module in expert_modules(model):
        plan = plan_experts(path, module, names.conversions)
        if isinstance(plan, str):
            whole[path] = plan
            continue
        plans.append(plan)
        for parameter in plan.parameters:
            del names.conversions[parameter]
    return plans, whole


def expert_report(
    name: str, shape: tuple[int, ...], nnz: int, dtype: torch.dtype, reason: str
) -> LayerReport:
    """Describe a 3-D parameter of a mixture-of-experts layer that stays dense, for this reason."""
    N, K = matrix_shape(shape)
    size = N * K * dtype.itemsize
    return LayerReport(
        name=name,
        N=N,
        K=K,
        dtype=str(dtype).removeprefix("torch."),
        format="dense",
        sparsity=1 - nnz / (N * K),
        dense_bytes=size,
        stored_bytes=size,
        backends={},
        reason=f"{_EXPERTS}: {reason}",
    )


class _DtypePlan:
    """The dtype of each parameter: the served one, save where an architecture insists on float32."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        strict = model._keep_in_fp32_modules_strict if dtype != torch.float32 else None
        loose = model._keep_in_fp32_modules if dtype == torch.float16 else None
        self._float32 = [re.compile(_as_pattern(name)) for names in (strict, loose) for name in names or ()]

    def of(self, name: str) -> torch.dtype:
        """The dtype that the parameter ``name`` is read in."""
        return torch.float32 if any(pattern.search(name) for pattern in self._float32) else self._dtype


def _as_pattern(name: str) -> str:
    """A regular expression from transformers' dotted names, in which ``*`` stands for anything."""
    return rf"(^|\.){re.escape(name).replace(re.escape('*'), '.*')}(\.|$)"


def _materialise_buffers(model: Any, device: torch.device) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies) their values, by transformers' own code."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).register_buffer(
            leaf, torch.empty_like(buffer, device=device), persistent=False
        )
    # Parameters are still on the meta device, where initialising them costs nothing.
    model.initialize_weights()


def _persistent_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in computed)


def convert(
    model: Any, first: str, conversion: Conversion, reader: WeightReader
) -> Iterator[tuple[str, Tensor]]:
    """Run one of transformers' conversions on tensors of the checkpoint."""

    def load(source: str) -> Tensor:
        entry = reader.checkpoint.entries[source]
        return reader.tensor(source, entry.shape)

    for source, pattern in conversion.sources:
        conversion.converter.add_tensor(first, source, pattern, lambda source=source: load(source))
    try:
        made = conversion.converter.convert(first, model=model, config=model.config)
    except CheckpointError:
        raise
    except Exception as error:
        sources = ", ".join(source for source, _ in conversion.sources[:3])
        raise CheckpointError(
            f"{reader.checkpoint.path}: {first} cannot be made from {len(conversion.sources)} tensors "
            f"({sources}, ...): {error}"
        ) from error
    for target, value in made.items():
        yield target, value[0] if isinstance(value, list) else value


def _read_exact(reader: WeightReader, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Read an integer or boolean buffer."""
    entry = reader.checkpoint.entries[name]
    if not isinstance(entry, TensorEntry) or entry.shape != shape or entry.dtype != dtype:
        raise fault(entry.file, name, f"{dtype} {list(shape)}", f"{entry.dtype} {list(entry.shape)}")
    reader.mark_used(name)
    return reader.checkpoint.read_small(entry).to(reader.device)


def _assign(model: nn.Module, name: str, tensor: Tensor, is_parameter: bool) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if is_parameter:
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)


def _same_values(reader: WeightReader, first: str, second: str) -> bool:
    a, b = reader.checkpoint.entries[first], reader.checkpoint.entries[second]
    if a.shape != b.shape:
        return False
    pairs = zip(reader.checkpoint.rows(a, reader.dtype), reader.checkpoint.rows(b, reader.dtype), strict=True)
    return all(torch.equal(x, y) for (_, x), (_, y) in pairs)


def ignored_patterns(model: Any) -> list[str]:
    """Names that transformers itself knows to be of no use in checkpoints of this architecture."""
    return [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        r"rotary_emb\.inv_freq$",
        r"(^|\.)position_ids$",
    ]


def _single_sequence(token_ids: Tensor, positions: Tensor, block_size: int) -> ForwardBatch:
    """A batch of one sequence that lives in block 1, so that slots and positions differ."""
    count, device = token_ids.shape[0], token_ids.device
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=positions + block_size,
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=(positions[-1:] + 1).to(torch.int32),
        block_tables=torch.ones((1, 1), dtype=torch.int32, device=device),
        logits_indices=torch.arange(count, device=device),
    )
