"""Running a model one layer at a time gives what transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from service.errors import CheckpointError
from service.model.checkpoint import Checkpoint
from service.pruning.layerwise import LayerwiseModel


def layerwise_logits(model: LayerwiseModel, batches: list[Tensor]) -> list[Tensor]:
    hidden = model.begin(batches)
    for layer in range(model.num_layers):
        with model.loaded_layer(layer):
            hidden = [model.run_layer(layer, states) for states in hidden]
    return list(model.finish(batches, hidden))


@pytest.mark.parametrize("kind", ["llama", "llama_untied", "qwen3_sliding", "opt", "gpt2"])
def test_logits_equal_those_of_transformers(kind: str, make_model: Callable[..., Path]) -> None:
    """Batches of two sizes, longer than the sliding window: masks and positions depend on both."""
    directory = make_model(kind)
    ids = torch.randint(0, 259, (5, 17), generator=torch.Generator().manual_seed(5))
    batches = [ids[:3], ids[3:]]
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        want = [reference(input_ids=batch).logits for batch in batches]

    got = layerwise_logits(LayerwiseModel(Checkpoint.open(directory)), batches)

    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_layer_is_in_memory_at_a_time(make_model: Callable[..., Path]) -> None:
    """Whatever a pass is doing, the other layers' parameters have no storage."""
    model = LayerwiseModel(Checkpoint.open(make_model("llama")))

    def resident() -> list[bool]:
        return [any(p.device.type != "meta" for p in layer.parameters()) for layer in model._layers]

    model.begin([torch.zeros(1, 4, dtype=torch.int64)])
    assert resident() == [False, False, False]
    with model.loaded_layer(1):
        assert resident() == [False, True, False]
    assert all(p.device.type == "meta" for p in model._model.parameters())


def test_linears_are_those_of_the_layer_and_not_the_head(make_model: Callable[..., Path]) -> None:
    """The names are the checkpoint's."""
    directory = make_model("llama_untied")
    model = LayerwiseModel(Checkpoint.open(directory))
    names = [name for layer in range(model.num_layers) for name in model.linears(layer)]

    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert [name.rpartition(".")[2] for name in names] == parts * 2
    assert all(f"{name}.weight" in Checkpoint.open(directory).entries for name in names)


def test_a_shape_that_disagrees_with_the_config_is_refused(make_model: Callable[..., Path]) -> None:
    """Named with what the config asks for, before any arithmetic."""
    directory = make_model("llama")
    config = directory / "config.json"
    config.write_text(
        config.read_text("utf-8").replace('"intermediate_size": 52', '"intermediate_size": 48'), "utf-8"
    )
    model = LayerwiseModel(Checkpoint.open(directory))

    with (
        pytest.raises(
            CheckpointError, match=r"gate_proj.weight: expected shape \[48, 44\].*found shape \[52, 44\]"
        ),
        model.loaded_layer(0),
    ):
        pass


def test_an_unknown_architecture_is_refused(make_model: Callable[..., Path]) -> None:
    """transformers' own message is kept."""
    directory = make_model("llama")
    config = directory / "config.json"
    config.write_text(config.read_text("utf-8").replace('"llama"', '"lamna"'), "utf-8")

    with pytest.raises(CheckpointError, match="lamna"):
        LayerwiseModel(Checkpoint.open(directory))
