"""inspect_checkpoint says what load_model would do, without doing it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from service.model.inspect import inspect_checkpoint
from service.model.loader import load_model
from tests.conformance.tiny_models import FOREIGN, NATIVE, save_model
from tests.unit.model.checkpoint_files import pack_directory


@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize(
    "name", ["llama", "llama_tied_head_dim_18", "qwen3", "gpt2", "opt", "mixtral", "qwen3_moe"]
)
def test_inspect_reports_what_loading_makes(name: str, form: str, tmp_path: Path) -> None:
    """The same layers, formats, bytes, backends and reasons, in the same order."""
    save_model((NATIVE | FOREIGN)[name](), tmp_path / "plain")
    pack_directory(tmp_path / "plain", tmp_path / "packed")
    inspection = inspect_checkpoint(tmp_path / form)
    loaded = load_model(tmp_path / form)
    assert inspection.layers == list(loaded.layer_reports())
    assert inspection.problem is None
    assert inspection.implementation == loaded.spec.implementation
    assert inspection.dtype == "float32"
    assert inspection.architecture == loaded.spec.architecture


@pytest.mark.parametrize("name", ["llama", "llama_tied_head_dim_18", "gpt2", "mixtral"])
def test_bytes_add_up_to_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Layers and the rest are every tensor once, a tied embedding counted as the head."""
    save_model((NATIVE | FOREIGN)[name](), tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    total = sum(tensor.numel() * 4 for tensor in load_file(tmp_path / "model.safetensors").values())
    assert inspection.dense_bytes + inspection.other_bytes == total
    assert inspection.dense_bytes == sum(layer.dense_bytes for layer in inspection.layers)
    assert inspection.stored_bytes == sum(layer.stored_bytes for layer in inspection.layers)


def test_the_dtype_can_be_another(tmp_path: Path) -> None:
    """float32 on disk, asked about in bfloat16: half the dense bytes."""
    save_model(NATIVE["llama"](), tmp_path)
    there, asked = inspect_checkpoint(tmp_path), inspect_checkpoint(tmp_path, dtype="bfloat16")
    assert asked.dense_bytes * 2 == there.dense_bytes
    assert {layer.dtype for layer in asked.layers} == {"bfloat16"}
    assert asked.layers == list(load_model(tmp_path, dtype="bfloat16").layer_reports())


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """Never falling, from near 0 to 1, for loading as well."""
    save_model(NATIVE["llama"](), tmp_path)
    for read in (inspect_checkpoint, load_model):
        seen: list[float] = []
        read(tmp_path, progress=lambda stage, fraction, seen=seen: seen.append(fraction))
        assert seen == sorted(seen)
        assert 0 < seen[0] < 0.5
        assert seen[-1] == pytest.approx(1.0)


def test_a_model_that_cannot_be_served_is_listed_with_the_reason(tmp_path: Path) -> None:
    """The sizes are of use even then."""
    save_model(transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4), tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.implementation == ""
    assert inspection.problem is not None
    assert "max_position_embeddings" in inspection.problem or "position_ids" in inspection.problem
    assert any(layer.N == 3 * 64 and layer.K == 64 for layer in inspection.layers)


def test_sparsity_is_that_of_the_weights(tmp_path: Path) -> None:
    """Not of what a configuration claims."""
    saved = save_model(NATIVE["llama"](), tmp_path, sparsity=0.7)
    layer = next(
        layer for layer in inspect_checkpoint(tmp_path).layers if layer.name.endswith("1.mlp.down_proj")
    )
    weight = saved.reference.model.layers[1].mlp.down_proj.weight
    assert layer.sparsity == pytest.approx(float((weight == 0).float().mean()))
    assert layer.format == "bitmap"
    assert torch.Size((layer.N, layer.K)) == weight.shape
