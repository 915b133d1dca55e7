"""The engine with a real decoder: the text that transformers generates, alone and in company."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from service.engine.client import EngineClient
from service.engine.config import EngineConfig
from service.engine.protocol import SamplingParams

PROMPTS = [[(37 * i + 11 * k) % 250 + 3 for i in range(1 + 7 * k)] for k in range(8)]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A small random Llama on disk, and transformers' greedy continuations of `PROMPTS`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        # Logits far enough apart that rounding does not decide which is largest.
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        wanted.append(whole[0, len(prompt) :].tolist())
    return directory, wanted


async def test_text_is_that_of_transformers(llama: tuple[Path, list[list[int]]]) -> None:
    """With small chunks, too few blocks for all, and a prefix cache that is warm from the first run."""
    directory, wanted = llama
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    # 24 blocks of 2 layers * 2 * 4 tokens * 2 heads * 16 * 4 bytes: the longest sequence needs 19.
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        max_num_sequences=8,
        max_step_tokens=16,
        kv_block_size=4,
        kv_cache_bytes=24 * 2 * 2 * 4 * 2 * 16 * 4,
        threads=1,
    )
    client = await EngineClient.start(config)

    async def generate(name: str, prompt: list[int]) -> list[int]:
        outputs = [output async for output in client.generate(name, prompt, sampling)]
        return [token for output in outputs for token in output.token_ids]

    try:
        assert client.info.num_kv_blocks == 24
        assert [await generate(f"alone{i}", prompt) for i, prompt in enumerate(PROMPTS)] == wanted
        together = await asyncio.gather(
            *(generate(f"together{i}", prompt) for i, prompt in enumerate(PROMPTS))
        )
        assert together == wanted
        assert client.stats.preemptions_total > 0
        assert client.stats.prefix_cache_hits_total > 0
    finally:
        await client.stop()
