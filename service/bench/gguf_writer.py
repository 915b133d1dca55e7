"""Write a Llama checkpoint as a float16 GGUF file, so that llama.cpp can be timed on the same weights.

Only what llama.cpp needs to load and decode: sizes, the tokenizer's vocabulary and merges, the tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from service.errors import StartupError

# Hugging Face name within a layer -> GGUF name within a block.
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_f16_gguf(model: Path, out: Path) -> None:
    """Convert the dense safetensors checkpoint `model` to the float16 GGUF file `out`.

    Raises:
        StartupError: the architecture is not Llama, or a tensor has no place in GGUF's Llama layout.
    """
    import gguf

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise StartupError(
            f"llama.cpp comparison: {model} is a {config['model_type']} model; only llama is converted"
        )
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]

    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, model, config)

    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                array = _to_gguf(tensors.get_tensor(name), name, heads, kv_heads)
                writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    prefix, layer, rest = name.removeprefix("model.").split(".", 2)
    module = rest.removesuffix(".weight")
    if prefix != "layers" or module not in _LAYER_TENSORS:
        raise StartupError(f"llama.cpp comparison: tensor {name} has no place in GGUF's Llama layout")
    return f"blk.{layer}.{_LAYER_TENSORS[module]}.weight"


def _to_gguf(tensor: torch.Tensor, name: str, heads: int, kv_heads: int) -> np.ndarray[Any, Any]:
    array = tensor.float().numpy()
    if array.ndim == 1:
        return array  # llama.cpp wants norms in float32
    if name.endswith("q_proj.weight"):
        array = _interleave_rotary(array, heads)
    elif name.endswith("k_proj.weight"):
        array = _interleave_rotary(array, kv_heads)
    return array.astype(np.float16)


def _interleave_rotary(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows from transformers' half-split rotary pairs to GGUF's adjacent pairs."""
    N, K = weight.shape
    return weight.reshape(heads, 2, N // heads // 2, K).swapaxes(1, 2).reshape(N, K)


def _add_tokenizer(writer: Any, model: Path, config: dict[str, Any]) -> None:
    import gguf

    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    by_id = {token_id: token for token, token_id in vocabulary.items()}
    special = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([by_id.get(i, f"<unused {i}>") for i in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in ids])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
