"""Converting a tiny GGUF that is written here by the gguf package itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from service.errors import CheckpointError
from service.pruning.gguf import convert

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "Ġ3"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

Weights = dict[str, np.ndarray[Any, Any]]


def hugging_face_weights() -> Weights:
    generator = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        }
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave_halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row 2i of a head is Hugging Face's row i, row 2i+1 its row D/2 + i: written as a loop, to be sure."""
    out = np.empty_like(weight)
    D = weight.shape[0] // heads
    for head in range(heads):
        for i in range(D // 2):
            out[head * D + 2 * i] = weight[head * D + i]
            out[head * D + 2 * i + 1] = weight[head * D + D // 2 + i]
    return out


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., tuple[Path, Weights]]:
    """Write the file; `metadata` replaces values, `extra` adds tensors. Returns what a reader should see."""

    def write(
        metadata: dict[str, str] | None = None, extra: tuple[str, ...] = (), quantised: bool = True
    ) -> tuple[Path, Weights]:
        text = {"arch": "llama", "model": "gpt2", "pre": "smollm"} | (metadata or {})
        file = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(file, text["arch"])
        writer.add_context_length(77)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_block_count(2)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(12345.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model(text["model"])
        writer.add_tokenizer_pre(text["pre"])
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
        writer.add_token_merges(["Ġ Ġ", "Ġ 3"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template(TEMPLATE)
        want = {}
        names = {
            "model.embed_tokens": "token_embd",
            "model.norm": "output_norm",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
        for name, weight in hugging_face_weights().items():
            module = name.removesuffix(".weight").replace("model.layers.", "blk.")
            for theirs, ggml in names.items():
                module = module.replace(theirs, ggml) if module.endswith(theirs) else module
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(module.rpartition(".")[2])
            stored = interleave_halves(weight, heads) if heads else weight
            kind = gguf.GGMLQuantizationType.Q4_1 if quantised and weight.ndim == 2 else None
            if kind is not None:
                packed = gguf.quantize(stored, kind)
                writer.add_tensor(module + ".weight", packed, raw_dtype=kind)
                # Rows are quantised each for themselves, so their order does not matter to the values.
                weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
            else:
                writer.add_tensor(module + ".weight", stored)
            want[name] = weight
        for name in extra:
            writer.add_tensor(name, np.zeros((4, 4), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file, want

    return write


@pytest.mark.parametrize("quantised", [False, True])
def test_weights_are_the_files_rounded_once_to_bfloat16(
    write_gguf: Callable[..., tuple[Path, Weights]], tmp_path: Path, quantised: bool
) -> None:
    """Rotary halves of q and k come back where Hugging Face expects them."""
    file, want = write_gguf(quantised=quantised)
    convert(file, tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")

    assert got.keys() == want.keys()
    for name, weight in want.items():
        assert torch.equal(got[name], torch.from_numpy(weight).to(torch.bfloat16)), name


def test_transformers_loads_the_directory_without_a_missing_or_odd_tensor(
    write_gguf: Callable[..., tuple[Path, Weights]], tmp_path: Path
) -> None:
    """With the sizes, the rotary base and the tied head that the file describes."""
    file, _ = write_gguf()
    convert(file, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)

    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = model.config
    assert (config.max_position_embeddings, config.num_key_value_heads, config.rms_norm_eps) == (77, 2, 1e-5)
    assert config.rope_parameters["rope_theta"] == 12345.0
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_generation_stops_at_the_end_of_a_turn(
    write_gguf: Callable[..., tuple[Path, Weights]], tmp_path: Path
) -> None:
    """Without it in generation_config a chat never ends."""
    file, _ = write_gguf()
    convert(file, tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")

    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_the_tokenizer_splits_digits_and_keeps_specials_and_text(
    write_gguf: Callable[..., tuple[Path, Weights]], tmp_path: Path
) -> None:
    """'a  3' is 'a', two blanks, '3': the byte-level rule alone would glue a blank to the digit."""
    file, _ = write_gguf()
    convert(file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")

    ids = tokenizer("<|im_start|>a  3<|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "a", "ĠĠ", "3", "<|im_end|>"]
    text = "Hello , it 's 1234 — naïve\n\n  done ."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a  3"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.model_max_length == 77
    assert len(tokenizer) == len(TOKENS)


def test_the_chat_template_is_the_files(
    write_gguf: Callable[..., tuple[Path, Weights]], tmp_path: Path
) -> None:
    """It decides what the chat endpoint sends to the model."""
    file, _ = write_gguf()
    convert(file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")

    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"arch": "gemma"}, "general.architecture is 'gemma'"),
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    write_gguf: Callable[..., tuple[Path, Weights]], tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    """Its tensors or its text would be read wrongly without any error; nothing is written."""
    file, _ = write_gguf(metadata)

    with pytest.raises(CheckpointError, match=message):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_without_a_place_is_refused(
    write_gguf: Callable[..., tuple[Path, Weights]], tmp_path: Path
) -> None:
    """A bias that is dropped changes the model."""
    file, _ = write_gguf(extra=("blk.0.attn_q.bias",))

    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias has no place"):
        convert(file, tmp_path / "out")


def test_what_is_not_a_gguf_is_refused(tmp_path: Path) -> None:
    """With the file's name."""
    file = tmp_path / "x.gguf"
    file.write_bytes(json.dumps({}).encode() * 100)

    with pytest.raises(CheckpointError, match=r"x\.gguf: cannot be read as GGUF"):
        convert(file, tmp_path / "out")
