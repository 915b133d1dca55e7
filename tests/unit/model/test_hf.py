"""Packed directories through transformers' own from_pretrained and save_pretrained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import service.model  # noqa: F401 - registers the quantizer
from service.errors import CheckpointError
from service.model.checkpoint import Checkpoint, PackedEntry
from service.pruning.pack import pack, verify
from tests.conformance.tiny_models import FOREIGN, NATIVE, prompt, reference_logits, save_model
from tests.unit.model.checkpoint_files import edit_config, edit_tensors, shard_directory

UP = "model.layers.1.mlp.up_proj"
NAMES = ["llama", "llama_tied_head_dim_18", "qwen3", "gpt2", "opt", "gpt_neox_partial_rotary", "phi3_fused"]


@pytest.mark.parametrize("name", [*NAMES, "mixtral", "gemma_scaled_embedding"])
def test_from_pretrained_gives_the_dense_source_and_saves_it_packed(name: str, tmp_path: Path) -> None:
    """Logits bit for bit, and a saved copy that holds the same tensors in the same form."""
    saved = save_model((NATIVE | FOREIGN)[name](), tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    tokens = prompt(11, seed=1)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="eager").eval()
    assert torch.equal(reference_logits(model, tokens), reference_logits(saved.reference, tokens))

    model.save_pretrained(tmp_path / "again")
    assert verify(tmp_path / "again", against=tmp_path / "plain").only_sign_of_zero == 0
    with Checkpoint.open(tmp_path / "packed") as one, Checkpoint.open(tmp_path / "again") as other:
        forms = [
            {key: isinstance(entry, PackedEntry) for key, entry in opened.entries.items()}
            for opened in (one, other)
        ]
    assert forms[0] == forms[1]
    assert any(forms[0].values())
    claims = [
        json.loads((tmp_path / directory / "config.json").read_text())["quantization_config"]
        for directory in ("packed", "again")
    ]
    assert claims[0] == claims[1]


def test_another_dtype_can_be_asked_for(tmp_path: Path) -> None:
    """As with any checkpoint."""
    saved = save_model(NATIVE["llama"](), tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    got = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(got, saved.reference.model.layers[1].mlp.up_proj.weight.bfloat16())


def test_shards_are_read(tmp_path: Path) -> None:
    """A packed weight's parts may lie in several files."""
    saved = save_model(NATIVE["llama"](), tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    shard_directory(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="eager")
    tokens = prompt(5, seed=2)
    assert torch.equal(reference_logits(model, tokens), reference_logits(saved.reference, tokens))


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (UP, r"up_proj\.weight: expected a tensor of shape \[104, 72\], found none"),
        (f"{UP}.row_offsets", r"up_proj\.row_offsets: expected this part"),
        ("model.norm.weight", r"model\.norm\.weight: expected a tensor of shape \[72\], found none"),
        ("lm_head.weight", r"lm_head\.weight: expected a tensor"),
    ],
)
def test_a_missing_tensor_is_an_error(lost: str, words: str, tmp_path: Path) -> None:
    """transformers itself would warn and go on with random values."""
    save_model(NATIVE["llama"](), tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    names = [
        name
        for name in load_file(tmp_path / "packed" / "model.safetensors")
        if name == lost or name.rpartition(".")[0] == lost
    ]
    edit_tensors(tmp_path / "packed", dict.fromkeys(names))
    with pytest.raises(CheckpointError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_a_tensor_of_another_model_is_an_error(tmp_path: Path) -> None:
    """A layer that the configuration does not have."""
    save_model(NATIVE["llama"](), tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    edit_config(tmp_path / "packed", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..*unknown"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    """The digests are compared here as well."""
    save_model(NATIVE["llama"](), tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    with Checkpoint.open(tmp_path / "packed") as checkpoint:
        part = checkpoint.entries[f"{UP}.weight"].parts[0]
    raw = bytearray(file.read_bytes())
    raw[part.offset + 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="SHA-256"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_a_head_that_differs_is_not_tied(tmp_path: Path) -> None:
    """Whatever the configuration says, as transformers itself does with plain files."""
    saved = save_model(NATIVE["llama_tied_head_dim_18"](), tmp_path / "plain")
    embedding = load_file(tmp_path / "plain" / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path / "plain", {"lm_head.weight": -embedding})
    pack(tmp_path / "plain", tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="eager")
    tokens = prompt(5, seed=3)
    assert torch.equal(reference_logits(model, tokens), -reference_logits(saved.reference, tokens))


def test_no_warning_is_given_for_a_sound_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Packed weights are no missing ones."""
    save_model(NATIVE["llama"](), tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    captured = capfd.readouterr()
    assert "MISSING" not in captured.err + captured.out
