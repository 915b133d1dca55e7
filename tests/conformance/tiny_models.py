"""Tiny random models of several architectures, pruned and saved as directories, and their runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from service.model.interface import CausalModel, ForwardBatch

VOCAB = 151
_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def _llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**_LLAMA_LIKE, **changes})


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, **parameters}


# Architectures with a native forward. Sizes are no multiples of anything; windows are shorter than prompts.
NATIVE: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama_tied_head_dim_18": lambda: _llama(tie_word_embeddings=True, head_dim=18),
    "llama_biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama_mha": lambda: _llama(num_key_value_heads=6),
    "llama3_rope": lambda: _llama(
        rope_parameters=_rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
    ),
    "linear_rope": lambda: _llama(rope_parameters=_rope(rope_type="linear", factor=2.0)),
    "yarn_rope": lambda: _llama(
        rope_parameters=_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral_window": lambda: transformers.MistralConfig(**_LLAMA_LIKE, sliding_window=7),
    "mistral_no_window": lambda: transformers.MistralConfig(**_LLAMA_LIKE, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA_LIKE),
    "qwen2_some_windows": lambda: transformers.Qwen2Config(
        **_LLAMA_LIKE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA_LIKE, head_dim=16),
}

_GPT: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 256}

# Architectures that run through transformers' modelling code.
FOREIGN: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=256, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "opt": lambda: transformers.OPTConfig(
        **_GPT,
        hidden_size=64,
        ffn_dim=144,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
    ),
    "opt_projected": lambda: transformers.OPTConfig(
        **_GPT,
        hidden_size=64,
        ffn_dim=144,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=40,
        do_layer_norm_before=False,
    ),
    "gpt_neox_partial_rotary": lambda: transformers.GPTNeoXConfig(
        **_GPT, hidden_size=64, intermediate_size=136, num_hidden_layers=2, num_attention_heads=4
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_LLAMA_LIKE, head_dim=12, moe_intermediate_size=40, num_experts=5, num_experts_per_tok=2
    ),
    "gemma_scaled_embedding": lambda: transformers.GemmaConfig(
        **{**_LLAMA_LIKE, "tie_word_embeddings": True}, head_dim=12
    ),
    "phi3_fused": lambda: transformers.Phi3Config(
        **_LLAMA_LIKE, pad_token_id=0, eos_token_id=0, bos_token_id=0
    ),
    "cohere_logit_scale": lambda: transformers.CohereConfig(
        **{**_LLAMA_LIKE, "tie_word_embeddings": True}, logit_scale=0.25
    ),
}


@dataclass
class SavedModel:
    """A model on disk and the same weights in transformers, the reference."""

    path: Path
    reference: Any


def save_model(
    config: Any, path: Path, *, sparsity: float = 0.5, seed: int = 0, dtype: torch.dtype = torch.float32
) -> SavedModel:
    """Make random weights that spread the logits, set a share of every linear's weights to zero, save."""
    torch.manual_seed(seed)
    config.dtype = dtype
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
        for module in reference.modules():
            if isinstance(module, (nn.Linear, Conv1D)) and module is not reference.get_output_embeddings():
                module.weight[torch.rand_like(module.weight, dtype=torch.float32) < sparsity] = 0
        for parameter in reference.parameters():
            if parameter.dim() == 3:  # experts
                parameter[torch.rand_like(parameter, dtype=torch.float32) < sparsity] = 0
    reference = reference.to(dtype)
    reference.save_pretrained(path)
    return SavedModel(path, reference)


@torch.no_grad()
def reference_logits(reference: Any, tokens: Sequence[int]) -> Tensor:
    """Logits of every token by transformers' own attention, float32."""
    logits: Tensor = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


@torch.no_grad()
def reference_greedy(reference: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation, recomputed from scratch for every token: no cache that could be wrong."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@dataclass
class PagedRun:
    """Drives a model over a paged cache as the engine does: any chunks of any sequences in one step.

    Blocks are handed out in random order, so that no slot equals a position by chance.
    """

    model: CausalModel
    block_size: int = 4
    num_blocks: int = 192
    seed: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = self.model.allocate_kv_cache(self.num_blocks, self.block_size)
        self.free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self.free)

    def step(self, chunks: Mapping[str, Sequence[int]], *, last_only: bool = False) -> dict[str, Tensor]:
        """Run one step; returns for each sequence the logits of its new tokens (or of the last one)."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        wanted: dict[str, list[int]] = {}
        for name, tokens in chunks.items():
            table, begin = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            while len(table) * self.block_size < begin + len(tokens):
                table.append(self.free.pop())
            for offset, token in enumerate(tokens):
                position = begin + offset
                ids.append(token)
                positions.append(position)
                slots.append(
                    table[position // self.block_size] * self.block_size + position % self.block_size
                )
            self.lengths[name] = begin + len(tokens)
            wanted[name] = list(range(starts[-1], len(ids)))[-1 if last_only else 0 :]
            starts.append(len(ids))
        width = max(len(self.tables[name]) for name in chunks)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in chunks]
        device = self.model.spec.device
        batch = ForwardBatch(
            token_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(
                [self.lengths[name] for name in chunks], dtype=torch.int32, device=device
            ),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            logits_indices=torch.tensor([i for rows in wanted.values() for i in rows], device=device),
        )
        logits = self.model.forward(batch, self.cache).cpu()
        sizes = [len(rows) for rows in wanted.values()]
        return dict(zip(wanted, logits.split(sizes), strict=True))

    def greedy(self, prompts: Mapping[str, Sequence[int]], count: int) -> dict[str, list[int]]:
        """Continue all prompts greedily, decoding them together."""
        made: dict[str, list[int]] = {name: [] for name in prompts}
        chunks: dict[str, Sequence[int]] = dict(prompts)
        for _ in range(count):
            logits = self.step(chunks, last_only=True)
            for name, rows in logits.items():
                made[name].append(int(rows[-1].argmax()))
            chunks = {name: [tokens[-1]] for name, tokens in made.items()}
        return made


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
