"""Run a causal LM with one decoder layer in memory at a time.

transformers' own modelling code does the arithmetic, so that the architectures it knows can be pruned and
measured. The model is built with its parameters on the meta device (sizes, no memory). Parameters outside
the decoder layers are loaded for the start and the end of a pass, those of a layer for that layer, from the
checkpoint, in float32.

Each layer is called as the whole model would call it: the arguments beside the hidden states (position
embeddings, masks, which differ between layers in some models) are recorded from a pass of the model in
which every layer hands its input on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from service.errors import CheckpointError
from service.model.checkpoint import Checkpoint
from service.model.experts import Experts, apply_gate_of
from service.model.transformers_model import map_names, take_expert_plans


class LayerwiseModel:
    """A causal LM over a checkpoint; see the module.

    Attributes:
        num_layers: decoder layers.

    Raises:
        CheckpointError: transformers has no such architecture, or its decoder layers cannot be found.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu") -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._checkpoint = checkpoint
        self._device = torch.device(device)
        try:
            config = AutoConfig.from_pretrained(
                checkpoint.path, trust_remote_code=False, local_files_only=True
            )
            for key in ("quantization_config", "compression_config"):
                if hasattr(config, key):
                    delattr(config, key)
            with _parameters_on_meta():
                self._model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
                )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'}: transformers cannot build this model: {error}"
            ) from error
        self._model.eval().requires_grad_(False)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device)
        # Parameters whose names differ from the checkpoint's by more than a prefix.
        self._names: dict[str, str] = {}
        self._split_experts()
        self._layers_name, self._layers = self._find_layers()
        self.num_layers = len(self._layers)
        self._calls: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        self._drop = self._checkpoint_prefix()

    def _split_experts(self) -> None:
        """Give each expert linears of its own, as the checkpoint has them, instead of 3-D parameters."""
        names = map_names(self._model, self._checkpoint)
        self._names |= names.direct
        plans, _ = take_expert_plans(self._model, names)
        for plan in plans:
            with _parameters_on_meta():
                gate_up = [_GateUp(plan.hidden, plan.inner) for _ in plan.down]
                down = [nn.Linear(plan.inner, plan.hidden, bias=False) for _ in plan.down]
            experts = Experts(gate_up, down, apply_gate_of(self._model.get_submodule(plan.path)))
            parent, _, leaf = plan.path.rpartition(".")
            setattr(self._model.get_submodule(parent), leaf, experts.eval())
            for index in range(len(plan.down)):
                self._names |= {
                    f"{plan.path}.gate_up.{index}.gate.weight": plan.gate[index],
                    f"{plan.path}.gate_up.{index}.up.weight": plan.up[index],
                    f"{plan.path}.down.{index}.weight": plan.down[index],
                }

    def _find_layers(self) -> tuple[str, nn.ModuleList]:
        expected = self._model.config.get_text_config().num_hidden_layers
        for name, module in self._model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == expected:
                return name, module
        raise CheckpointError(
            f"{self._checkpoint.path}: {type(self._model).__name__} has no list of {expected} decoder layers"
        )

    def _checkpoint_prefix(self) -> str:
        """What the model's names have in front of the file's: some bases were saved without their head."""
        first = next(name for name, _ in self._layers.named_parameters())
        name = f"{self._layers_name}.{first}"
        base = f"{self._model.base_model_prefix}."
        entries = self._checkpoint.entries
        if name not in entries and name.removeprefix(base) in entries:
            return base
        return ""

    def key(self, name: str) -> str:
        """The checkpoint's name of the model's parameter `name`."""
        return self._names.get(name, name.removeprefix(self._drop))

    def linears(self, layer: int) -> dict[str, nn.Module]:
        """The layer's modules that multiply by a matrix, by the checkpoint's name, in the model's order."""
        prefix = f"{self._layers_name}.{layer}"
        return {
            self.key(f"{prefix}.{name}.weight").removesuffix(".weight"): module
            for name, module in self._layers[layer].named_modules()
            if isinstance(module, (nn.Linear, Conv1D))
        }

    def layer_key(self, layer: int) -> str:
        """What the checkpoint's names of the layer's tensors begin with, a dot included."""
        return self.key(f"{self._layers_name}.{layer}.")

    @torch.inference_mode()
    def begin(self, batches: list[Tensor]) -> list[Tensor]:
        """Compute the inputs of layer 0.

        Args:
            batches: token ids, ``[B, T]`` int64 each.

        Returns:
            Hidden states, ``[B, T, H]`` float32 each.
        """
        self._calls.clear()
        with self._outer_parameters():
            return [self._record(batch) for batch in batches]

    def _record(self, batch: Tensor) -> Tensor:
        calls: list[dict[str, Any]] = [{} for _ in self._layers]
        first: list[Tensor] = []

        def forward(layer: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if layer == 0:
                first.append(hidden.clone())
            calls[layer] = {"args": args, "kwargs": kwargs}
            if layer == self.num_layers - 1:
                raise _PassDone
            return hidden

        with self._replaced_forwards(forward):
            try:
                self._model(input_ids=batch.to(self._device), use_cache=False)
            except _PassDone:
                # The arguments depend on the positions alone, so one record serves all batches of a shape.
                self._calls.setdefault(tuple(batch.shape), calls)
                return first[0]
        raise CheckpointError(
            f"{self._checkpoint.path}: {type(self._model).__name__} did not call its last decoder layer"
        )

    @contextmanager
    def loaded_layer(self, layer: int) -> Iterator[nn.Module]:
        """Hold the layer's parameters in memory for the block."""
        module = self._layers[layer]
        self._load(module, f"{self._layers_name}.{layer}")
        try:
            yield module
        finally:
            _unload(module)

    @torch.inference_mode()
    def run_layer(self, layer: int, hidden: Tensor) -> Tensor:
        """Apply a loaded layer to ``[B, T, H]``; returns the same shape."""
        call = self._calls[tuple(hidden.shape[:2])][layer]
        output = self._layers[layer](hidden, *call["args"], **call["kwargs"])
        if not isinstance(output, Tensor):
            raise CheckpointError(
                f"{self._checkpoint.path}: decoder layers of {type(self._model).__name__} return "
                f"{type(output).__name__}, not hidden states; this architecture cannot be run layer by layer"
            )
        return output

    @torch.inference_mode()
    def finish(self, batches: list[Tensor], hidden: list[Tensor]) -> Iterator[Tensor]:
        """Turn the last layer's outputs into logits, ``[B, T, vocabulary]`` float32, batch by batch.

        Args:
            batches: the token ids given to `begin`.
            hidden: the last layer's outputs, in the same order.
        """
        with self._outer_parameters():
            for batch, states in zip(batches, hidden, strict=True):

                def forward(
                    layer: int, hidden: Tensor, *_: Any, states: Tensor = states, **__: Any
                ) -> Tensor:
                    return states if layer == self.num_layers - 1 else hidden

                with self._replaced_forwards(forward):
                    logits: Tensor = self._model(input_ids=batch.to(self._device), use_cache=False).logits
                yield logits

    @contextmanager
    def _replaced_forwards(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        """Let each layer compute ``forward(layer index, hidden, ...)`` instead of its own forward."""

        def bound(layer: int) -> Callable[..., Tensor]:
            return lambda *args, **kwargs: forward(layer, *args, **kwargs)

        for index, layer in enumerate(self._layers):
            layer.forward = bound(index)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    @contextmanager
    def _outer_parameters(self) -> Iterator[None]:
        """Hold everything outside the decoder layers in memory for the block."""
        inside = {id(module) for module in self._layers.modules()}
        outside = {name: module for name, module in self._model.named_modules() if id(module) not in inside}
        config = self._model.config.get_text_config()
        head = self._model.get_output_embeddings()
        tied = bool(getattr(config, "tie_word_embeddings", False)) and head is not None
        try:
            for name, module in outside.items():
                self._load_own(module, name, skip="weight" if tied and module is head else None)
            if tied:
                head._parameters["weight"] = self._model.get_input_embeddings().weight
            yield
        finally:
            for module in outside.values():
                _unload_own(module)

    def _load(self, module: nn.Module, prefix: str) -> None:
        for name, child in module.named_modules():
            self._load_own(child, f"{prefix}.{name}" if name else prefix)

    def _load_own(self, module: nn.Module, prefix: str, skip: str | None = None) -> None:
        persistent = {
            name: value
            for name, value in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, value in {**module._parameters, **persistent}.items():
            if value is None or name == skip:
                continue
            key = self.key(f"{prefix}.{name}" if prefix else name)
            entry = self._checkpoint.find(key, tuple(value.shape))
            tensor = self._checkpoint.read(entry).to(self._device, value.dtype)
            if name in persistent:
                module._buffers[name] = tensor
            else:
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


class _GateUp(nn.Module):
    """One expert's gate and up matrices, which the checkpoint stores apart: ``[M, H]`` to ``[M, 2 I]``."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Both products, one behind the other."""
        return torch.cat([self.gate(x), self.up(x)], dim=-1)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear module's weight lies as ``[K, N]`` (GPT-2's Conv1D)."""
    return isinstance(module, Conv1D)


def matrix_of(module: nn.Module) -> Tensor:
    """A linear module's weight as ``[N, K]``, a view."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if is_transposed(module) else weight


class _PassDone(Exception):
    """Ends a pass once the last decoder layer was called."""


def _unload(module: nn.Module) -> None:
    for child in module.modules():
        _unload_own(child)


def _unload_own(module: nn.Module) -> None:
    for name, value in module._parameters.items():
        if value is not None:
            module._parameters[name] = nn.Parameter(value.to("meta"), requires_grad=False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters have sizes but no memory, while buffers (rotary frequencies) are real.

    `torch.device("meta")` would leave the buffers without values too, and those that no checkpoint holds
    could not be filled in afterwards.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
