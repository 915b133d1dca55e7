"""The native forward of Llama-like decoders: fused projections, about eight operations a layer, no modules.

Families: Llama (SmolLM among them), Mistral, Qwen2 and Qwen3. `unsupported` says why a configuration is not
for this code; such a model is run by transformers_model instead. Nothing of a configuration is ignored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_ext import decoder_ops  # noqa: F401 - registers the ops that are bound below

from .attention import STATIC_ROPE_TYPES, allocate_kv_cache, kv_bytes_per_block, rope_tables
from .checkpoint import Checkpoint
from .interface import ForwardBatch, KvCache, LayerReport, ModelSpec
from .linear import TIED_HEAD, BoundLinear, SparseLinear
from .weights import LinearPlan, WeightReader

_log = logging.getLogger("lacunar.model")

# Stored by old versions of transformers; computed from the configuration since.
IGNORED_TENSORS = (r"(^|\.)rotary_emb\.inv_freq$",)


@dataclass(frozen=True, slots=True)
class _Family:
    """What modelling code fixes and a configuration does not say."""

    architecture: str
    qkv_bias: Callable[[Any], bool]
    o_bias: Callable[[Any], bool]
    qk_norm: bool = False
    has_window: bool = True


def _never(_: Any) -> bool:
    return False


def _always(_: Any) -> bool:
    return True


def _attention_bias(config: Any) -> bool:
    return bool(config.attention_bias)


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", _attention_bias, _attention_bias, has_window=False),
    "mistral": _Family("MistralForCausalLM", _never, _never),
    "qwen2": _Family("Qwen2ForCausalLM", _always, _never),
    "qwen3": _Family("Qwen3ForCausalLM", _attention_bias, _attention_bias, qk_norm=True),
}

# Settings of relatives that change the forward pass, and the values that mean "not used". The families above
# do not define them; where a configuration sets one all the same, transformers decides what it means.
_FOREIGN_SETTINGS: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "alibi": (None, False),
    "parallel_attn": (None, False),
    "is_causal": (None, True),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
}


def unsupported(config: Any) -> str | None:
    """Say why the native forward does not implement a transformers configuration; None if it does in full."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        return f"model_type {config.model_type!r} has no native forward"
    if config.architectures and config.architectures != [family.architecture]:
        return f"architectures {config.architectures} is not [{family.architecture!r}]"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act {config.hidden_act!r} is not silu"
    rope = config.rope_parameters
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if kind not in STATIC_ROPE_TYPES:
        return f"rope_parameters {rope!r} is of no static rope type ({', '.join(sorted(STATIC_ROPE_TYPES))})"
    for source in (rope.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None)):
        if source not in (None, 1, 1.0):
            return f"partial_rotary_factor {source} rotates a part of each head only"
    for key, unused in _FOREIGN_SETTINGS.items():
        value = getattr(config, key, None)
        if value not in unused:
            return f"{key}={value!r} is not implemented"
    window = getattr(config, "sliding_window", None)
    if window is not None and not family.has_window:
        return f"sliding_window={window} is not a setting of {family.architecture}"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layer_types has {', '.join(sorted(kinds))}"
    if _head_dim(config) % 2:
        return f"head_dim {_head_dim(config)} is odd"
    return None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Names of one decoder layer's tensors."""

    qkv: LinearPlan
    o: LinearPlan
    gate_up: LinearPlan
    down: LinearPlan
    input_norm: str
    post_norm: str
    q_norm: str | None
    k_norm: str | None
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """Names of a model's tensors. ``head`` is None where the output embedding is the input embedding."""

    embedding: str
    layers: tuple[LayerPlan, ...]
    norm: str
    head: LinearPlan | None

    def linears(self) -> Iterable[LinearPlan]:
        """Every linear layer in the model's order, the tied head excepted."""
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
        if self.head is not None:
            yield self.head

    def others(self, config: Any) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that is in no linear layer."""
        hidden, head_dim = (config.hidden_size,), (_head_dim(config),)
        yield self.embedding, (config.vocab_size, config.hidden_size)
        for layer in self.layers:
            yield layer.input_norm, hidden
            yield layer.post_norm, hidden
            for norm in (layer.q_norm, layer.k_norm):
                if norm is not None:
                    yield norm, head_dim
        yield self.norm, hidden


def make_plan(config: Any, checkpoint: Checkpoint) -> DecoderPlan:
    """Lay out which tensors a supported configuration wants."""
    family = _FAMILIES[config.model_type]
    # A bare LlamaModel is stored without the prefix.
    bare = (
        "model.embed_tokens.weight" not in checkpoint.entries and "embed_tokens.weight" in checkpoint.entries
    )
    prefix = "" if bare else "model."
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, _head_dim(config)
    q_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    mlp_bias = bool(getattr(config, "mlp_bias", False))

    def linear(
        module: str, parts: dict[str, int], K: int, bias: bool, fused: str | None = None
    ) -> LinearPlan:
        return LinearPlan(
            name=f"{module}.{fused or next(iter(parts))}",
            sources=tuple((f"{module}.{part}.weight", rows) for part, rows in parts.items()),
            K=K,
            biases=tuple(f"{module}.{part}.bias" for part in parts) if bias else (),
        )

    layers = []
    for index in range(config.num_hidden_layers):
        base = f"{prefix}layers.{index}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        layers.append(
            LayerPlan(
                qkv=linear(
                    attention,
                    {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
                    hidden,
                    family.qkv_bias(config),
                    "qkv_proj",
                ),
                o=linear(attention, {"o_proj": hidden}, q_rows, family.o_bias(config)),
                gate_up=linear(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, mlp_bias, "gate_up_proj"),
                down=linear(mlp, {"down_proj": hidden}, inner, mlp_bias),
                input_norm=f"{base}.input_layernorm.weight",
                post_norm=f"{base}.post_attention_layernorm.weight",
                q_norm=f"{attention}.q_norm.weight" if family.qk_norm else None,
                k_norm=f"{attention}.k_norm.weight" if family.qk_norm else None,
                window=_window(config, index),
            )
        )
    head = None
    if not config.tie_word_embeddings:
        head = LinearPlan("lm_head", (("lm_head.weight", config.vocab_size),), hidden)
    return DecoderPlan(f"{prefix}embed_tokens.weight", tuple(layers), f"{prefix}norm.weight", head)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: SparseLinear
    o: SparseLinear
    gate_up: SparseLinear
    down: SparseLinear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


@dataclass(slots=True)
class _BoundStep:
    """The layers with their products bound for one bucket of M, and how many steps ran through them."""

    bucket: str
    backends: Counter[str]
    layers: list[tuple[Any, ...]]
    steps: int = 0


class NativeDecoder:
    """A Llama-like model over the paged cache. See `CausalModel` for the contract."""

    def __init__(self, spec: ModelSpec, config: Any, plan: DecoderPlan, reader: WeightReader) -> None:
        """Read all weights that ``plan`` names.

        Raises:
            CheckpointError: a tensor is missing, inconsistent or unknown.
        """
        self.spec = spec
        hidden = config.hidden_size
        self._eps = float(config.rms_norm_eps)
        self._scale = float(spec.head_dim**-0.5)
        self._embedding = reader.tensor(plan.embedding, (config.vocab_size, hidden))
        self._layers = [self._read_layer(reader, layer, hidden, spec.head_dim) for layer in plan.layers]
        self._norm = reader.tensor(plan.norm, (hidden,))
        self._head = self._read_head(reader, plan, hidden)
        reader.check_all_used(IGNORED_TENSORS)
        self._cos, self._sin = rope_tables(config, spec.head_dim, spec.max_model_len, spec.device)
        self._steps: dict[str, _BoundStep] = {}
        self._step_by_tokens: dict[int, _BoundStep] = {}
        self._head_by_rows: dict[int, BoundLinear] = {}
        ops = torch.ops.kernels_ext
        self._ops = (
            ops.add_rms_norm.default,
            ops.rope_kv_write.default,
            ops.paged_attention.default,
            ops.silu_mul.default,
        )
        self._rms_norm = ops.rms_norm.default

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Make an empty cache on the model's device, in the model's dtype."""
        return allocate_kv_cache(self.spec, num_blocks, block_size)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block takes over all layers."""
        return kv_bytes_per_block(self.spec, block_size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Run one step and write its keys and values; returns logits ``[L, vocab_size]`` float32."""
        positions, slots = batch.positions, batch.slot_mapping
        tables, starts, contexts = batch.block_tables, batch.query_start, batch.context_lens
        cos, sin, eps, scale, heads = self._cos, self._sin, self._eps, self._scale, self.spec.num_heads
        add_rms_norm, rope_kv_write, paged_attention, silu_mul = self._ops
        tokens = positions.shape[0]
        step = self._step_by_tokens.get(tokens)
        if step is None:
            step = self._step_by_tokens[tokens] = self._bind(tokens)
        step.steps += 1

        # The residual stream: add_rms_norm adds to it in place, and it is a fresh tensor here.
        residual = F.embedding(batch.token_ids, self._embedding)
        x = self._rms_norm(residual, self._layers[0].input_norm, eps)
        for (qkv, o, gate_up, down, post_norm, next_norm, q_norm, k_norm, window), keys, values in zip(
            step.layers, kv_cache.keys, kv_cache.values, strict=True
        ):
            q = rope_kv_write(qkv(x), cos, sin, positions, slots, keys, values, heads, q_norm, k_norm, eps)
            attended = paged_attention(q, keys, values, tables, starts, contexts, scale, window)
            x = add_rms_norm(o(attended), residual, post_norm, eps)
            x = add_rms_norm(down(silu_mul(gate_up(x))), residual, next_norm, eps)

        wanted = batch.logits_indices
        rows = wanted.shape[0]
        head = self._head_by_rows.get(rows)
        if head is None:
            head = self._head_by_rows[rows] = self._head.bind(rows)
        head.calls += 1
        # With one token a step there is nothing to select.
        logits = head.call(x if rows == tokens == 1 else x.index_select(0, wanted))
        return logits.to(torch.float32)

    def count_step(self, tokens: int) -> None:
        """Count a replayed step of that many tokens, all of whose logits are wanted, as `forward` counts."""
        self._step_by_tokens[tokens].steps += 1
        self._head_by_rows[tokens].calls += 1

    def layer_reports(self) -> list[LayerReport]:
        """Describe every linear layer, in the model's order; the output embedding is the last."""
        return [linear.report() for linear in self._linears()]

    def linear_calls(self) -> dict[str, int]:
        """Calls since load by "backend|m_bucket"."""
        total: Counter[str] = Counter(self._head.calls())
        for step in self._steps.values():
            for backend, linears in step.backends.items():
                total[f"{backend}|{step.bucket}"] += linears * step.steps
        return dict(total)

    def _linears(self) -> Iterable[SparseLinear]:
        for layer in self._layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
        yield self._head

    def _bind(self, tokens: int) -> _BoundStep:
        first = self._layers[0].qkv.bind(tokens)
        step = self._steps.get(first.bucket)
        if step is not None:
            return step
        # What follows a layer is the next layer's input norm, and the final norm after the last.
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        backends: Counter[str] = Counter()
        bound = []
        for layer, next_norm in zip(self._layers, next_norms, strict=True):
            products = [linear.bind(tokens) for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
            backends.update(product.backend for product in products)
            calls = [product.call for product in products]
            bound.append((*calls, layer.post_norm, next_norm, layer.q_norm, layer.k_norm, layer.window))
        step = self._steps[first.bucket] = _BoundStep(first.bucket, backends, bound)
        return step

    def _read_layer(self, reader: WeightReader, plan: LayerPlan, hidden: int, head_dim: int) -> _Layer:
        return _Layer(
            qkv=reader.linear(plan.qkv),
            o=reader.linear(plan.o),
            gate_up=reader.linear(plan.gate_up),
            down=reader.linear(plan.down),
            input_norm=reader.tensor(plan.input_norm, (hidden,)),
            post_norm=reader.tensor(plan.post_norm, (hidden,)),
            q_norm=None if plan.q_norm is None else reader.tensor(plan.q_norm, (head_dim,)),
            k_norm=None if plan.k_norm is None else reader.tensor(plan.k_norm, (head_dim,)),
            window=plan.window,
        )

    def _read_head(self, reader: WeightReader, plan: DecoderPlan, hidden: int) -> SparseLinear:
        if plan.head is not None:
            return reader.linear(plan.head)
        name, shape = "lm_head.weight", tuple(self._embedding.shape)
        if name in reader.checkpoint.entries:
            # Some tools store both. transformers unties what differs, whatever the configuration says.
            entry = reader.checkpoint.find(name, shape)
            for first, rows in reader.checkpoint.rows(entry, reader.dtype):
                ours = self._embedding[first : first + rows.shape[0]]
                if not torch.equal(rows.to(ours.device), ours):
                    _log.warning(
                        "%s: tensor %s differs from the embedding that config.json ties it to: not tied",
                        entry.file,
                        name,
                    )
                    return reader.linear(LinearPlan("lm_head", ((name, shape[0]),), hidden))
            reader.mark_used(name)
        return SparseLinear("lm_head", self._embedding, None, TIED_HEAD)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _window(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    if window is None:
        return None
    kinds = getattr(config, "layer_types", None)
    return int(window) if kinds is None or kinds[layer] == "sliding_attention" else None


def common_window(config: Any) -> int | None:
    """The sliding window where every layer has the same one, else None."""
    windows = {_window(config, layer) for layer in range(config.num_hidden_layers)}
    return windows.pop() if len(windows) == 1 else None
