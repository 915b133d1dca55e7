"""Which code runs a model, what is refused, and how much memory loading takes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from service.errors import BackendUnavailable, CheckpointError, SettingsError, StartupError
from service.model import linear as linear_module
from service.model.inspect import inspect_checkpoint
from service.model.loader import load_model
from tests.conformance.tiny_models import (
    FOREIGN,
    NATIVE,
    VOCAB,
    PagedRun,
    prompt,
    reference_logits,
    save_model,
)
from tests.unit.model.checkpoint_files import edit_config, edit_tensors, pack_directory, small_llama

# --- which code runs it ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"attention_multiplier": 0.1}, "attention_multiplier=0.1"),
    ],
)
def test_what_the_native_code_lacks_goes_through_transformers(
    changes: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting is never ignored: the reason is logged, and transformers decides what the setting means."""
    small_llama(tmp_path)
    edit_config(tmp_path, **changes)
    with caplog.at_level(logging.INFO, logger="lacunar.model"):
        model = load_model(tmp_path)
    assert model.spec.implementation == "transformers"
    assert words in caplog.text
    with pytest.raises(SettingsError, match="implementation='native'"):
        load_model(tmp_path, implementation="native")
    assert words in inspect_checkpoint(tmp_path).reason


def test_settings_that_mean_nothing_stay_native(tmp_path: Path) -> None:
    """Real configurations carry these (SmolLM2's has rope_interleaved: false)."""
    small_llama(tmp_path)
    edit_config(tmp_path, rope_interleaved=False, is_llama_config=True, pretraining_tp=1)
    assert load_model(tmp_path).spec.implementation == "native"


def test_spec_is_what_the_engine_needs(tmp_path: Path) -> None:
    """Sizes, the window that all layers share, and the end-of-sequence tokens of generation_config.json."""
    save_model(NATIVE["mistral_window"](), tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [5, 7]}))
    spec = load_model(tmp_path, max_model_len=100).spec
    assert (spec.vocab_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        VOCAB,
        3,
        6,
        2,
        12,
    )
    assert (spec.max_model_len, spec.window, spec.eos_token_ids) == (100, 7, (5, 7))
    assert spec.dtype == torch.float32
    save_model(NATIVE["qwen2_some_windows"](), tmp_path)
    assert load_model(tmp_path).spec.window is None


def test_eos_of_the_configuration_is_the_default(tmp_path: Path) -> None:
    """Without a generation_config.json."""
    small_llama(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, eos_token_id=[2, 3])
    assert load_model(tmp_path).spec.eos_token_ids == (2, 3)


def test_eos_outside_the_vocabulary_never_reaches_the_sampler(tmp_path: Path) -> None:
    """Cut-down models keep the id of the full one; masking it would fail the step for all."""
    small_llama(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, eos_token_id=[2, VOCAB, 50256])
    assert load_model(tmp_path).spec.eos_token_ids == (2,)


def test_a_copy_of_the_embedding_is_tied(tmp_path: Path) -> None:
    """Some tools write lm_head.weight beside a tied embedding."""
    save_model(NATIVE["llama_tied_head_dim_18"](), tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, {"lm_head.weight": embedding.clone()})
    for implementation in ("native", "transformers"):
        report = list(load_model(tmp_path, implementation=implementation).layer_reports())[-1]
        assert report.name == "lm_head"
        assert "tied" in report.reason


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_head_that_differs_is_not_tied(
    implementation: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers unties them, whatever the configuration says: the logits are those of the stored head."""
    saved = save_model(NATIVE["llama_tied_head_dim_18"](), tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, {"lm_head.weight": -embedding})
    model = load_model(tmp_path, implementation=implementation)
    tokens = prompt(5, seed=1)
    got = PagedRun(model).step({"a": tokens})["a"]
    torch.testing.assert_close(got, -reference_logits(saved.reference, tokens), rtol=0, atol=1e-4)
    assert "not tied" in caplog.text


def test_a_model_without_its_head_prefix_is_loaded(tmp_path: Path) -> None:
    """LlamaModel alone stores no `model.` prefix; with a tied head nothing is missing."""
    saved = save_model(NATIVE["llama_tied_head_dim_18"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit_tensors(
        tmp_path,
        dict.fromkeys(tensors) | {name.removeprefix("model."): value for name, value in tensors.items()},
    )
    tokens = prompt(5, seed=1)
    for implementation in ("native", "transformers"):
        got = PagedRun(load_model(tmp_path, implementation=implementation)).step({"a": tokens})["a"]
        torch.testing.assert_close(got, reference_logits(saved.reference, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mixtral", "phi3_fused"])
def test_packed_checkpoints_of_other_architectures(name: str, tmp_path: Path) -> None:
    """Packed on disk, also where the matrix is stored transposed (GPT-2) or is one expert (Mixtral)."""
    saved = save_model(FOREIGN[name](), tmp_path / "plain")
    (tmp_path / "packed").mkdir()
    pack_directory(tmp_path / "plain", tmp_path / "packed")
    tokens = prompt(9, seed=2)
    got = PagedRun(load_model(tmp_path / "packed")).step({"a": tokens})["a"]
    torch.testing.assert_close(got, reference_logits(saved.reference, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_packed_one_by_one(name: str, tmp_path: Path) -> None:
    """In transformers 5 they are one 3-D parameter; replacing its linears alone would leave them dense."""
    save_model(FOREIGN[name](), tmp_path)
    model = load_model(tmp_path)
    reports = [report for report in model.layer_reports() if ".experts." in report.name]
    E = 4 if name == "mixtral" else 5
    assert len(reports) == 2 * 3 * E
    assert {report.format for report in reports} == {"bitmap"}
    assert len({report.name for report in reports}) == len(reports)
    run = PagedRun(model)
    run.step({"a": prompt(3, seed=1)})
    # Every token goes through two experts, so the others of a layer are not multiplied by.
    assert sum(model.linear_calls().values()) < len(model.layer_reports())


def test_experts_of_another_layout_stay_dense_and_say_why(tmp_path: Path) -> None:
    """A file that holds the 3-D parameters themselves: transformers multiplies by them, and so do we."""
    saved = save_model(FOREIGN["mixtral"](), tmp_path)
    state = dict(saved.reference.state_dict())
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    tokens = prompt(9, seed=2)
    model = load_model(tmp_path)
    reports = [report for report in model.layer_reports() if ".experts." in report.name]
    assert {report.format for report in reports} == {"dense"}
    assert all("not stored as one matrix for each expert" in report.reason for report in reports)
    got = PagedRun(model).step({"a": tokens})["a"]
    torch.testing.assert_close(got, reference_logits(saved.reference, tokens), rtol=0, atol=1e-4)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """transformers would load such a file with random values."""
    save_model(FOREIGN["mixtral"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("experts.2.w3.weight"))
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        load_model(tmp_path)


def test_linear_calls_are_counted(tmp_path: Path) -> None:
    """Per step one call of each layer; the head sees only the rows that are wanted."""
    small_llama(tmp_path)
    for implementation, layers in (("native", 4), ("transformers", 7)):
        model = load_model(tmp_path, implementation=implementation)
        assert model.linear_calls() == {}
        run = PagedRun(model)
        run.step({"a": prompt(5, seed=1)}, last_only=True)
        run.step({"a": [3]})
        run.step({"a": [4]})
        assert sum(model.linear_calls().values()) == 3 * (3 * layers + 1)
        ones = sum(calls for key, calls in model.linear_calls().items() if key.endswith("|1"))
        assert ones == 2 * (3 * layers + 1) + 1


def test_kv_bytes_are_those_of_the_cache(tmp_path: Path) -> None:
    """The engine sizes the cache from this figure."""
    save_model(NATIVE["qwen3"](), tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path)
    cache = model.allocate_kv_cache(5, 8)
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in cache.keys + cache.values)
    assert allocated == 5 * model.kv_bytes_per_block(8)
    assert cache.num_blocks == 5


# --- what is refused ---

_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}

REFUSED: dict[str, tuple[Any, str]] = {
    "attention sinks": (
        lambda: transformers.GptOssConfig(
            **_SMALL,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
            max_position_embeddings=128,
            layer_types=["full_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "s_aux",
    ),
    "softcapping": (
        lambda: transformers.Gemma2Config(
            **_SMALL, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16
        ),
        "softcap",
    ),
    "no position_ids": (lambda: transformers.BloomConfig(**_SMALL, n_layer=2, n_head=4), "position_ids"),
    "a recurrent state": (
        lambda: transformers.MambaConfig(**_SMALL),
        "state other than keys and values",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_architectures_that_paging_cannot_serve_are_refused(case: str, tmp_path: Path) -> None:
    """Before the first request, in a sentence; wrong text would be worse."""
    make, words = REFUSED[case]
    save_model(make(), tmp_path)
    with pytest.raises(StartupError, match="cannot be served") as error:
        load_model(tmp_path, max_model_len=64)
    assert words in str(error.value)


def test_attention_that_is_not_what_it_says_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load compares with transformers' own attention: a wrong result stops the start."""
    from service.model import attention

    save_model(FOREIGN["opt"](), tmp_path)
    right = attention.decoder_ops.paged_attention
    monkeypatch.setattr(
        attention.decoder_ops,
        "paged_attention",
        lambda q, k, v, tables, starts, lens, scale, window: right(
            q, k, v, tables, starts, lens, scale * 2, window
        ),
    )
    with pytest.raises(StartupError, match=r"logits of 8 tokens through paged attention differ"):
        load_model(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """A configuration that names code of its own is refused, and the code stays unread."""
    small_llama(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit_config(
        tmp_path, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    )
    with pytest.raises(CheckpointError, match="without remote code"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_hub_name_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only directories are read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="expected a directory"):
        load_model("HuggingFaceTB/SmolLM2-135M")


def test_an_unavailable_device_is_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer does not depend on the checkpoint."""
    monkeypatch.setattr(linear_module, "_has_kernel", lambda op, key: False)
    with pytest.raises(BackendUnavailable):
        load_model(tmp_path / "nothing", device="cuda")


# --- memory ---

_MEASURE = """
import ctypes, gc, sys, torch
from service.model.loader import load_model

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
# Imports, code pages and one-time allocations, which depend on what else is installed; the weights go back to
# the system, because MALLOC_MMAP_THRESHOLD_ gives each a mapping of its own.
load_model(sys.argv[1], implementation=sys.argv[2])
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")   # forget the peak so far
before = status("VmRSS")
model = load_model(sys.argv[1], implementation=sys.argv[2])
peak = status("VmHWM") - before
reports = list(model.layer_reports())
stored = sum(r.stored_bytes for r in reports)
dense = sum(r.dense_bytes for r in reports)
print(peak, stored, dense, max(r.dense_bytes for r in reports))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 122 MB dense, 80% sparse, plain and packed; all layers hold the same random weights."""
    root = tmp_path_factory.mktemp("large")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=10,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    made: dict[tuple[int, ...], torch.Tensor] = {}
    for shape in {tuple(shape) for shape in shapes.values()}:
        weight = torch.randn(shape)
        weight[torch.rand(shape) < 0.8] = 0
        made[shape] = weight.to(torch.bfloat16)
    config.save_pretrained(root / "plain")
    # Tensors of one shape share their memory here; a file holds each on its own.
    tensors = {name: made[tuple(shape)].clone() for name, shape in shapes.items()}
    save_file(tensors, root / "plain" / "model.safetensors")
    pack_directory(root / "plain", root / "packed")
    return root


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory counter")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_peak_memory_is_the_packed_model_and_one_dense_layer(
    form: str, implementation: str, large: Path
) -> None:
    """A mapping of the file, or a forgotten dense copy, would show: the dense model is far larger."""
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(large / form), implementation],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
    )
    peak, stored, dense, largest = map(int, result.stdout.split())
    # Pieces being converted, the allocator's slack, modules and reports.
    slack = 12 << 20
    assert dense > stored + 2 * (largest + slack)
    assert peak <= stored + largest + slack
