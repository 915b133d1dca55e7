"""Mixture-of-experts layers: transformers 5 keeps the experts as 3-D parameters, files as one matrix each.

Replacing ``nn.Linear`` would skip them silently. Here an experts module is replaced as a whole by one with a
linear for each expert's matrices, so that they are pruned, stored and multiplied like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .weights import LinearPlan


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Which tensors make the experts of one layer; entry e of each list belongs to expert e.

    Attributes:
        path: the experts module of the model.
        gate, up: names of the ``[I, H]`` matrices.
        down: names of the ``[H, I]`` matrices.
        hidden, inner: H and I.
    """

    path: str
    gate: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]
    hidden: int
    inner: int

    @property
    def parameters(self) -> tuple[str, str]:
        """The 3-D parameters that these tensors are for transformers."""
        return f"{self.path}.gate_up_proj", f"{self.path}.down_proj"

    def linears(self) -> Iterator[tuple[LinearPlan, LinearPlan]]:
        """Each expert's layers: gate and up as one, and down."""
        for index, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            name = f"{self.path}.{index}"
            yield (
                LinearPlan(f"{name}.gate_up_proj", ((gate, self.inner), (up, self.inner)), self.hidden),
                LinearPlan(f"{name}.down_proj", ((down, self.hidden),), self.inner),
            )


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with 3-D parameters of its own, with its path."""
    for path, module in model.named_modules():
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            yield path, module


def plan_experts(path: str, module: Any, conversions: dict[str, Any]) -> ExpertsPlan | str:
    """Lay out the experts of a module, or say why transformers' own code has to multiply by them.

    Args:
        path, module: from `expert_modules`.
        conversions: of the model's NameMap.
    """
    if set(dict(module.named_parameters(recurse=False))) != {"gate_up_proj", "down_proj"}:
        return "its parameters are not gate_up_proj and down_proj"
    if module.is_transposed or not module.is_concatenated or module.has_bias or module.has_post_expert_norm:
        return "its experts are transposed, interleaved, or have biases or norms"
    E, H, I = module.down_proj.shape  # noqa: E741
    if tuple(module.gate_up_proj.shape) != (E, 2 * I, H):
        return f"gate_up_proj is {list(module.gate_up_proj.shape)} beside down_proj of {[E, H, I]}"
    found = []
    for name, operations in (
        ("gate_up_proj", [("MergeModulelist", 0), ("Concatenate", 1)]),
        ("down_proj", [("MergeModulelist", 0)]),
    ):
        conversion = conversions.get(f"{path}.{name}")
        if conversion is None:
            return f"{name} is not stored as one matrix for each expert"
        converter = conversion.converter
        if [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations] != operations:
            return f"{name} is not made by merging one matrix for each expert"
        for pattern in converter.source_patterns:
            # In the order of the experts: names were matched in natural order.
            found.append(tuple(source for source, by in conversion.sources if by == pattern))
    if len(found) != 3 or any(len(names) != E for names in found):
        return f"it has {E} experts, but the checkpoint has {[len(names) for names in found]} matrices"
    gate, up, down = found
    return ExpertsPlan(path, gate, up, down, hidden=H, inner=I)


class Experts(nn.Module):
    """The experts of one layer, each with linears of its own. Called as transformers' experts are.

    Attributes:
        gate_up: for each expert, ``[M, H]`` to ``[M, 2 I]``: gate, then up.
        down: for each expert, ``[M, I]`` to ``[M, H]``.
    """

    def __init__(
        self,
        gate_up: Sequence[nn.Module],
        down: Sequence[nn.Module],
        apply_gate: Callable[[Tensor], Tensor],
    ) -> None:
        """``apply_gate`` makes ``[M, I]`` of ``[M, 2 I]``, by the activation of the architecture."""
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self._apply_gate = apply_gate

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Add up what each token's experts make of it.

        Args:
            hidden: ``[T, H]``.
            top_k_index: ``[T, k]`` int64, a token's experts; the number of experts stands for none.
            top_k_weights: ``[T, k]``, how much each counts.

        Returns:
            ``[T, H]``.
        """
        out = torch.zeros_like(hidden)
        chosen = top_k_index.reshape(-1)
        # One sort instead of a search for each expert: places of the same expert follow each other.
        order = chosen.argsort(stable=True)
        tokens, weights = order // top_k_index.shape[1], top_k_weights.reshape(-1)[order, None]
        counts = torch.bincount(chosen, minlength=len(self.down)).tolist()
        start = 0
        for gate_up, down, count in zip(self.gate_up, self.down, counts[: len(self.down)], strict=True):
            if count:
                rows = tokens[start : start + count]
                made = down(self._apply_gate(gate_up(hidden[rows]))) * weights[start : start + count]
                out.index_add_(0, rows, made.to(out.dtype))
            start += count
        return out


def apply_gate_of(module: Any) -> Callable[[Tensor], Tensor]:
    """A transformers experts module's gating, which is kept; its parameters are dropped."""
    apply_gate: Callable[[Tensor], Tensor] = module._apply_gate
    module._parameters.clear()
    return apply_gate
