"""Tiny models with random weights, awkward sizes and a real tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 259

_MOE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    # K of 44 and 52 leaves padding bits in the bitmap; one head of keys serves two of queries.
    "llama": lambda: LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=44,
        intermediate_size=52,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=True,
    ),
    "llama_untied": lambda: LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    ),
    # Layers of two kinds, with different masks.
    "qwen3_sliding": lambda: Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
    ),
    "mixtral": lambda: MixtralConfig(
        **_MOE, intermediate_size=20, num_local_experts=3, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_MOE, intermediate_size=40, moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2
    ),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}


def save_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: one token per byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(specials + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    ).save_pretrained(directory)


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Save a random model of one of CONFIGS; further arguments go to `save_pretrained`."""

    def make(
        kind: str = "llama", name: str = "model", dtype: torch.dtype = torch.float32, **save: Any
    ) -> Path:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                # Initial weights of 0.02 leave every token about equally likely; these tell apart.
                parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(0.1)
        directory = tmp_path / name
        model.save_pretrained(directory, **save)
        save_tokenizer(directory)
        (directory / "LICENSE").write_text("free\n", encoding="utf-8")
        return directory

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 1200 different-looking bytes."""
    file = tmp_path / "text.txt"
    words = [f"word{i * 7919 % 1009}" for i in range(200)]
    file.write_text(" ".join(words)[:1200], encoding="utf-8")
    return file
