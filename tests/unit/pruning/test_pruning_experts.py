"""Mixtures of experts: each expert's matrices are pruned by the tokens that reach it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from service.model.checkpoint import Checkpoint
from service.pruning.calibration import CalibrationOptions, token_windows
from service.pruning.layerwise import LayerwiseModel
from service.pruning.methods import prune_weight
from service.pruning.prune import PruneOptions, prune
from service.pruning.report import PerplexityOptions, perplexity

KINDS = ["mixtral", "qwen3_moe"]


def options(text: Path, **values: object) -> PruneOptions:
    calibration = CalibrationOptions(text=text, sequences=5, sequence_tokens=60)
    return PruneOptions(calibration=calibration, **values)  # type: ignore[arg-type]


def read(directory: Path) -> dict[str, Tensor]:
    with Checkpoint.open(directory) as checkpoint:
        return {name: checkpoint.read(entry) for name, entry in checkpoint.entries.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_every_expert_is_pruned(
    kind: str, method: str, make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """Half of each expert goes, of each row where the method goes by rows; the router keeps all."""
    source = make_model(kind)
    report = prune(source, tmp_path / "out", options(text, method=method, sparsity=0.5))
    before, after = read(source), read(tmp_path / "out")
    assert before.keys() == after.keys()
    experts = [name for name in after if ".experts." in name]
    assert {name.removesuffix(".weight") for name in experts} <= {layer.name for layer in report.layers}
    for name in experts:
        zeros = (after[name] == 0).sum(dim=1)
        rows, columns = after[name].shape
        assert int(zeros.sum()) == rows * (columns // 2), name
        if method != "sparsegpt":
            assert zeros.tolist() == [columns // 2] * rows, name
    routers = [name for name in after if name.endswith(".gate.weight")]
    assert len(routers) == 2
    for name in routers:
        assert torch.equal(after[name], before[name])
        assert name.removesuffix(".weight") in report.left_dense


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_is_pruned_by_the_tokens_that_reach_it(
    kind: str, make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """Wanda's norms of the first layer's experts, taken from transformers' own router and hidden states."""
    source = make_model(kind)
    skip = r"self_attn|layers\.1\."  # what comes before the experts stays as it is
    prune(source, tmp_path / "out", options(text, method="wanda", sparsity=0.5, skip=skip))
    before, after = read(source), read(tmp_path / "out")

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: dict[str, Tensor] = {}
    experts = model.model.layers[0].mlp.experts

    def record(_module: object, args: tuple[Tensor, ...]) -> None:
        seen["hidden"], seen["index"] = args[0], args[1]

    handle = experts.register_forward_pre_hook(record)
    with torch.no_grad():
        model(input_ids=token_windows(source, text, sequences=5, sequence_tokens=60).tokens)
    handle.remove()
    gates = sorted(
        name for name in before if "layers.0" in name and name.endswith(("w1.weight", "gate_proj.weight"))
    )
    assert len(gates) == experts.gate_up_proj.shape[0]
    for index, name in enumerate(gates):
        rows = seen["hidden"][(seen["index"] == index).any(dim=1)]
        assert 0 < len(rows) < 300
        assert torch.equal(after[name], prune_weight(before[name], 0.5, rows.norm(dim=0))), name


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer_perplexity_is_transformers(
    kind: str, make_model: Callable[..., Path], text: Path
) -> None:
    """With the experts' products replaced, the model still computes what transformers does."""
    source = make_model(kind)
    wanted = PerplexityOptions(text=text, context_tokens=100)
    got = perplexity(source, wanted)
    windows = token_windows(source, text, sequences=None, sequence_tokens=100).tokens
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=windows).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert got.nll == pytest.approx(float(nll), rel=1e-5)


def test_an_expert_that_no_token_reached_is_left_as_it_is(
    make_model: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pruning it by norms of zero would be a guess; the report says so, also after an interruption."""
    source = make_model("mixtral")
    begin = LayerwiseModel.run_layer

    def without_expert_0(self: LayerwiseModel, layer: int, hidden: Tensor) -> Tensor:
        router = self._layers[layer].mlp.gate
        # The last expert takes the place of the first.
        handle = router.register_forward_hook(
            lambda _module, _args, out: (
                *out[:-1],
                torch.where(out[-1] == 0, len(router.weight) - 1, out[-1]),
            )
        )
        try:
            return begin(self, layer, hidden)
        finally:
            handle.remove()

    monkeypatch.setattr(LayerwiseModel, "run_layer", without_expert_0)
    report = prune(source, tmp_path / "out", options(text, method="wanda", sparsity=0.5))
    before, after = read(source), read(tmp_path / "out")
    left = [name for name in before if ".experts.0." in name]
    assert len(left) == 6
    for name in left:
        assert torch.equal(before[name], after[name])
        assert "no calibration token" in report.left_dense[name.removesuffix(".weight")]
    stored = json.loads((tmp_path / "out" / "pruning.json").read_text("utf-8"))
    assert stored["left_dense"] == report.left_dense
