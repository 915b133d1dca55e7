"""Turn the GGUF file of a Llama-like model into an ordinary Hugging Face directory, in bfloat16.

Read with the `gguf` package and written from its values alone, because what transformers does with a GGUF
depends on its version and on what else is installed (it may keep the weights in their blocks and fetch
kernels for them), and because it loses part of the tokenizer: it splits text by the byte-level rule only,
where these models split off every digit first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from service.errors import CheckpointError

from .progress import Progress, no_progress
from .writer import new_directory, pending, write_json, write_safetensors

# GGUF's token types (ggml's llama_token_type): 3 is a control token.
_CONTROL_TOKEN = 3

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(gguf_file: Path, out: Path, progress: Progress = no_progress) -> None:
    """Write `out` with config, generation config, tokenizer, chat template and bfloat16 safetensors.

    Dequantised values are rounded once, from float32 to bfloat16.

    Args:
        gguf_file: a GGUF of architecture `llama` with a `gpt2` vocabulary and the `smollm` pre-tokenizer.
        out: a directory that does not exist; it appears complete or not at all.
        progress: called with the share of the tensors that is written.

    Raises:
        CheckpointError: the file is not such a GGUF; names the key or the tensor, expected and found.
        FileExistsError: `out` exists.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{gguf_file}: cannot be read as GGUF: {error}") from error
    metadata = _Metadata(gguf_file, reader)
    metadata.expect("general.architecture", "llama")
    with new_directory(out) as directory:
        tensors = _tensors(gguf_file, reader, metadata, progress)
        config = _config(metadata, tensors)
        entries = [pending(name, tensor) for name, tensor in tensors.items()]
        write_safetensors(directory / "model.safetensors", entries)
        write_json(directory / "config.json", config)
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(directory / "generation_config.json", generation)
        _save_tokenizer(metadata, directory)


class _Metadata:
    """The file's key-value pairs; a missing or unexpected one is an error that names it."""

    def __init__(self, file: Path, reader: Any) -> None:
        self._file = file
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"{self._file}: has no {key}, which this conversion needs")
        return self._fields[key].contents()

    def expect(self, key: str, value: str) -> None:
        if self[key] != value:
            raise CheckpointError(f"{self._file}: {key} is {self[key]!r}, only {value!r} can be converted")


def _tensors(file: Path, reader: Any, metadata: _Metadata, progress: Progress) -> dict[str, Tensor]:
    from gguf import dequantize

    heads = {
        "attn_q.weight": metadata["llama.attention.head_count"],
        "attn_k.weight": metadata["llama.attention.head_count_kv"],
    }
    tensors: dict[str, Tensor] = {}
    for done, entry in enumerate(reader.tensors):
        progress("convert", done / len(reader.tensors))
        values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy()).float()
        # GGUF lists sizes fastest-varying first.
        values = values.reshape([int(size) for size in reversed(entry.shape.tolist())])
        if entry.name in _OUTER_TENSORS:
            name = _OUTER_TENSORS[entry.name]
        else:
            block, _, rest = entry.name.removeprefix("blk.").partition(".")
            if not entry.name.startswith("blk.") or rest not in _LAYER_TENSORS:
                raise CheckpointError(f"{file}: tensor {entry.name} has no place in a Llama model")
            if rest in heads:
                values = _undo_rotary_permutation(values, heads[rest])
            name = f"model.layers.{block}.{_LAYER_TENSORS[rest]}"
        tensors[name] = values.to(torch.bfloat16).contiguous()
    progress("convert", 1.0)
    return tensors


def _undo_rotary_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """Order q or k rows as Hugging Face does.

    ggml rotates neighbouring pairs of a head, Hugging Face the first half against the second; llama.cpp's
    converter therefore interleaves the halves, and this takes them apart again.
    """
    N, K = weight.shape
    return weight.reshape(num_heads, N // num_heads // 2, 2, K).transpose(1, 2).reshape(N, K)


def _config(metadata: _Metadata, tensors: dict[str, Tensor]) -> dict[str, Any]:
    vocab_size, hidden_size = tensors["model.embed_tokens.weight"].shape
    num_heads = metadata["llama.attention.head_count"]
    epsilon = metadata["llama.attention.layer_norm_rms_epsilon"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden_size // num_heads),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        # The file holds it as float32; 7 digits bring back the decimal number that was meant.
        "rms_norm_eps": float(f"{epsilon:.6e}"),
        "rope_parameters": {"rope_theta": metadata["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": vocab_size,
    }


def _save_tokenizer(metadata: _Metadata, directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata.expect("tokenizer.ggml.model", "gpt2")
    metadata.expect("tokenizer.ggml.pre", "smollm")
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise CheckpointError("tokenizer.ggml.add_bos_token is true, which smollm tokenizers do not do")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
