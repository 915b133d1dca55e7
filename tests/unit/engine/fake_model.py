"""A CausalModel that is cheap, deterministic, and wrong as soon as a single slot of the KV cache is.

Each token leaves a number that depends on it and its position; the logits at a position depend on the sum of
the numbers that attention reads through the block table. All sums are integers below 2**24, so float32 holds
them exactly and a batch cannot change them. Some tokens and model names misbehave on purpose.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from service.errors import CheckpointError
from service.model.interface import ForwardBatch, KvCache, LayerReport, ModelSpec

VOCAB = 64
EOS = 63
MAX_MODEL_LEN = 8192

NAN_TOKEN = 60
"""Whoever has it in the last computed tokens gets NaN logits."""
RAISING_TOKEN = 61
"""The step that computes it raises."""
BREAKING_TOKEN = 62
"""The step that computes it raises, and so does every step after it."""


class FakeModel:
    def __init__(self, max_model_len: int | None) -> None:
        self.spec = ModelSpec(
            architecture="Fake",
            implementation="native",
            vocab_size=VOCAB,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            max_model_len=min(max_model_len or MAX_MODEL_LEN, MAX_MODEL_LEN),
            dtype=torch.float32,
            device=torch.device("cpu"),
            eos_token_ids=(EOS,),
        )
        self.calls: Counter[str] = Counter()
        self.broken = False

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        shape = (num_blocks, block_size, 1, 1)
        # A slot that is read before it is written must show.
        return KvCache([torch.full(shape, torch.nan)], [torch.full(shape, torch.nan)], block_size)

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 8 * block_size

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        if self.broken or (batch.token_ids == BREAKING_TOKEN).any():
            self.broken = True
            raise RuntimeError("the device is lost (of /secret/path)")
        if (batch.token_ids == RAISING_TOKEN).any():
            raise RuntimeError("cannot compute this token (of /secret/path)")
        self.calls["dense|1"] += 1
        flat = kv_cache.keys[0].view(-1)
        flat[batch.slot_mapping] = contribution(batch.token_ids, batch.positions)
        sums = torch.zeros(len(batch.token_ids))
        bounds = batch.query_start.tolist()
        for index, (start, end) in enumerate(itertools.pairwise(bounds)):
            length = int(batch.context_lens[index])
            blocks = batch.block_tables[index, : -(-length // kv_cache.block_size)].long()
            running = kv_cache.keys[0][blocks].reshape(-1)[:length].double().cumsum(0).float()
            assert batch.positions[start:end].tolist() == list(range(length - (end - start), length))
            sums[start:end] = running[length - (end - start) :]
        logits = logits_of(sums[batch.logits_indices])
        logits[batch.token_ids[batch.logits_indices] == NAN_TOKEN] = torch.nan
        return logits

    def layer_reports(self) -> list[LayerReport]:
        return [
            LayerReport(
                name="layer",
                N=64,
                K=64,
                dtype="float32",
                format="dense",
                sparsity=0.0,
                dense_bytes=16384,
                stored_bytes=16384,
                backends={"1": "dense"},
                reason="fake",
            )
        ]

    def linear_calls(self) -> dict[str, int]:
        return dict(self.calls)


def contribution(tokens: Tensor, positions: Tensor) -> Tensor:
    return ((tokens * 31 + positions * 17 + 7) % 1009).float()


def logits_of(sums: Tensor) -> Tensor:
    """``[L, VOCAB]`` from ``[L]`` exact integer sums."""
    phases = (sums.double() % 997 + 1)[:, None] * torch.arange(1, VOCAB + 1, dtype=torch.float64) * 0.37
    logits = (4 * torch.sin(phases)).float()
    logits[:, NAN_TOKEN:EOS] = -20.0
    return logits


def reference_logits(tokens: list[int]) -> Tensor:
    """``[len(tokens), VOCAB]``: what the model says after each token, without a cache."""
    ids = torch.tensor(tokens)
    return logits_of(contribution(ids, torch.arange(len(tokens))).double().cumsum(0).float())


def reference_greedy(prompt: list[int], count: int, *, stops: tuple[int, ...] = ()) -> list[int]:
    """The greedy continuation, up to and with the first stop token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(tokens)[-1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def load(
    model: str, *, max_model_len: int | None, progress: Callable[[str, float], None], **_: object
) -> FakeModel:
    """The model factory. The name chooses a way to fail."""
    progress("load weights", 0.5)
    match model:
        case "bad-checkpoint":
            raise CheckpointError("model.safetensors: tensor lm_head.weight is missing")
        case "unforeseen":
            raise KeyError("lm_head")
        case "talks":
            logging.getLogger("lacunar.model").info("told at info")
        case "dies":
            os._exit(7)
        case "hangs":
            threading.Event().wait()
    progress("load weights", 1.0)
    return FakeModel(max_model_len)
