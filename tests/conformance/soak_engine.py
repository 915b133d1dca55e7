"""Random traffic against a real engine process, on any device; a script, not a test of the suite.

    python -m tests.conformance.soak_engine --device cuda --seconds 600

Requests arrive, share beginnings, leave early, sample or decode greedily, in a KV cache too small for all of
them. A greedy request of a few fixed prompts must give the tokens that transformers gives (the model is
float32). At the end no block is in use, nothing is open, and the engine process has not grown by a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from service.engine.client import EngineClient
from service.engine.config import EngineConfig
from service.engine.protocol import SamplingParams
from service.errors import QueueFull

from .tiny_models import NATIVE, prompt, reference_greedy, save_model

CLIENTS = 24
NEW_TOKENS = 64
PROMPTS = 6


class Soak:
    """Clients that each send one request after the other until the time is up."""

    def __init__(self, client: EngineClient, wanted: list[tuple[list[int], list[int]]], end: float) -> None:
        self.client, self.wanted, self.end = client, wanted, end
        self.checked = self.left = self.sampled = self.refused = 0

    async def one_client(self, number: int) -> None:
        rng = random.Random(number)
        turn = 0
        while time.monotonic() < self.end:
            turn += 1
            tokens, answer = rng.choice(self.wanted)
            count = rng.randrange(1, NEW_TOKENS + 1)
            greedy = rng.random() < 0.8
            sampling = SamplingParams(
                max_tokens=count,
                temperature=0.0 if greedy else 1.0,
                top_p=rng.choice((1.0, 0.9)),
                logprobs=rng.choice((None, None, 2)),
                ignore_eos=True,
            )
            leaves_after = rng.randrange(count + 1) if rng.random() < 0.2 else None
            got: list[int] = []
            try:
                stream = self.client.generate(f"{number}-{turn}", tokens, sampling)
            except QueueFull:
                self.refused += 1
                await asyncio.sleep(0.01)
                continue
            async for output in stream:
                assert output.error is None, output.error
                got += output.token_ids
                if leaves_after is not None and len(got) >= leaves_after:
                    self.left += 1
                    break
            await stream.aclose()
            if greedy:
                assert got == answer[: len(got)], f"request {number}-{turn}: {got}, want {answer[: len(got)]}"
                self.checked += 1
            else:
                self.sampled += 1
            if leaves_after is None:
                assert len(got) == count, f"request {number}-{turn} gave {len(got)} tokens, want {count}"


async def soak(model: Path, wanted: list[tuple[list[int], list[int]]], device: str, seconds: float) -> None:
    """Raises AssertionError for what must not be."""
    config = EngineConfig(
        model=str(model),
        device=device,
        max_num_sequences=16,
        max_step_tokens=64,
        max_queue=32,
        # A sixth of what 16 sequences of the longest kind need.
        kv_cache_bytes=sum(len(tokens) + NEW_TOKENS for tokens, _ in wanted) * 512,
        seed=1,
        threads=1,
    )
    client = await EngineClient.start(config)
    try:
        soak = Soak(client, wanted, time.monotonic() + seconds / 10)
        await asyncio.gather(*(soak.one_client(number) for number in range(CLIENTS)))
        process = psutil.Process(client.pid)
        before = process.memory_info().rss
        soak.end = time.monotonic() + seconds * 9 / 10
        await asyncio.gather(*(soak.one_client(number) for number in range(CLIENTS, 2 * CLIENTS)))
        while client.open_sequences or client.stats.running or client.stats.kv_blocks_used:
            await asyncio.sleep(0.05)
            assert time.monotonic() < soak.end + 60, f"not idle: {client.stats}"
        grown = process.memory_info().rss / before
        stats = client.stats
        print(
            f"{soak.checked} greedy requests as transformers, {soak.sampled} sampled, {soak.left} left "
            f"early, {soak.refused} refused; {stats.preemptions_total} preemptions, "
            f"{stats.prefix_cache_hits_total} of {stats.prefix_cache_queries_total} prompt tokens cached; "
            f"{stats.kv_blocks_used} of {stats.kv_blocks_total} blocks in use, memory x{grown:.3f}"
        )
        assert grown < 1.1, f"the engine process grew to {grown:.2f} times its size"
        assert min(soak.checked, soak.left, soak.sampled) > 0, "too little traffic to tell"
    finally:
        await client.stop()


def main() -> int:
    """Make a tiny model, ask transformers once, and let traffic loose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the reference is tiny
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(NATIVE["llama"](), Path(directory))
        beginning = prompt(48, seed=1)
        wanted = []
        for index in range(PROMPTS):
            tokens = [*beginning[: 4 * index], *prompt(3 + 5 * index, seed=20 + index)]
            wanted.append((tokens, reference_greedy(model.reference, tokens, NEW_TOKENS)))
        asyncio.run(soak(Path(directory), wanted, options.device, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
