"""Tokens per second through HTTP against the engine alone, on the same model.

    python benchmarks/bench_serve.py MODEL [--device cuda] [--concurrency 1 16 64] [--out FILE]

First an engine process is driven directly; then a server is started and asked by as many concurrent streaming
clients. Both decode the same prompts greedily, without end-of-sequence, and count tokens from the first
request to the last answer. With --make-llama HIDDEN LAYERS a model of random pruned weights is written to
MODEL first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from service.engine.client import EngineClient
from service.engine.config import EngineConfig
from service.engine.protocol import SamplingParams


def make_llama(path: Path, hidden: int, layers: int, sparsity: float) -> None:
    """Write a random pruned Llama in bf16 and a tokenizer that knows single bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.http.tiny_tokenizer import write_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight[torch.rand(module.weight.shape, device=device) < sparsity] = 0
    model.save_pretrained(path)
    write_tokenizer(path)


async def run_engine(
    config: EngineConfig, prompts: list[list[int]], new_tokens: int, rounds: int
) -> list[float]:
    """Seconds of each round with the engine alone."""
    client = await EngineClient.start(config)
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    seconds = []

    async def one(name: str, prompt: list[int]) -> None:
        count = 0
        async for output in client.generate(name, prompt, sampling):
            count += len(output.token_ids)
        assert count == new_tokens, count

    try:
        for round_ in range(rounds + 1):
            begin = time.monotonic()
            client.admit(len(prompts))
            await asyncio.gather(*(one(f"{round_}-{i}", prompt) for i, prompt in enumerate(prompts)))
            seconds.append(time.monotonic() - begin)
    finally:
        await client.stop()
    return seconds[1:]  # the first warms up


async def run_http(url: str, prompts: list[list[int]], new_tokens: int, rounds: int) -> list[float]:
    """Seconds of each round through HTTP, one streaming request for each prompt."""
    seconds = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def one(prompt: list[int]) -> None:
            body = {
                "prompt": prompt,
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            usage = None
            async with http.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and '"usage":{' in line.replace(" ", ""):
                        usage = json.loads(line[6:])["usage"]
            assert usage is not None
            assert usage["completion_tokens"] == new_tokens, usage

        for _ in range(rounds + 1):
            begin = time.monotonic()
            await asyncio.gather(*(one(prompt) for prompt in prompts))
            seconds.append(time.monotonic() - begin)
    return seconds[1:]


def start_server(options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    """A server on a free port, ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from service.cli import main; main()", "serve", str(options.model)]
    command += ["--device", options.device, "--port", str(port), "--no-access-log"]
    command += ["--max-num-sequences", str(max(options.concurrency)), "--no-enable-prefix-caching"]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server stopped with status {server.returncode}")
        try:
            if httpx.get(url + "/readyz").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    print(f"ready after {time.monotonic() - begin:.1f} s", flush=True)
    return server, url


def main() -> None:
    """Measure both, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make-llama", type=int, nargs=2, metavar=("HIDDEN", "LAYERS"))
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument(
        "--metrics-out", type=Path, help="where to leave the server's /metrics after the load"
    )
    parser.add_argument("--commit", help="recorded in the JSON; default: ask git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.make_llama:
        make_llama(options.model, *options.make_llama, options.sparsity)

    def prompts(count: int) -> list[list[int]]:
        return [[(7 * i + j) % 200 + 3 for j in range(options.prompt_tokens)] for i in range(count)]

    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        max_num_sequences=max(options.concurrency),
        max_step_tokens=2048 if options.device.startswith("cuda") else 256,
        enable_prefix_caching=False,
    )
    rows: list[dict[str, Any]] = []
    alone = {
        count: asyncio.run(run_engine(config, prompts(count), options.new_tokens, options.rounds))
        for count in options.concurrency
    }
    server, url = start_server(options)
    try:
        for count in options.concurrency:
            http = asyncio.run(run_http(url, prompts(count), options.new_tokens, options.rounds))
            tokens = count * options.new_tokens
            engine_rate = tokens / statistics.median(alone[count])
            http_rate = tokens / statistics.median(http)
            rows.append(
                {
                    "concurrency": count,
                    "engine_tokens_per_second": engine_rate,
                    "http_tokens_per_second": http_rate,
                    "share": http_rate / engine_rate,
                    "engine_seconds": alone[count],
                    "http_seconds": http,
                }
            )
            print(
                f"{count:3d} at once: engine {engine_rate:9.1f} tokens/s, HTTP {http_rate:9.1f} tokens/s, "
                f"{http_rate / engine_rate:.1%}",
                flush=True,
            )
        if options.metrics_out:
            options.metrics_out.write_text(httpx.get(url + "/metrics").text)
    finally:
        server.terminate()
        server.wait(60)
    if options.out:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        content = {
            "benchmark": "bench_serve",
            "commit": options.commit or git.stdout.strip() or "unknown",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": sys.argv,
            "model": options.make_llama or str(options.model),
            "sparsity": options.sparsity,
            "device": options.device,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
            "rows": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
