"""Time of a decode step and of a prefill on a GPU, dense and sparse side by side on random weights.

    python benchmarks/bench_decode.py [--model llama-3.1-8b] [--sparsity 0.5 0.7] [--batch 1 16 64]

Needs no checkpoint: random weights of a real architecture's shape are made and packed on the GPU, layer by
layer. A step is the engine's own: the forward in a CUDA graph over a paged cache, all sequences at the
same context length. For the share of the linears, the same products are timed alone in a graph of their own,
in the step's order; what remains of the step is everything else. Contenders take turns in rounds, and the
median counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig

from service.model.decoder import NativeDecoder, make_plan
from service.model.interface import ForwardBatch, ModelSpec
from service.model.linear import Format, SparseLinear, choose_format, pack

MODELS = {
    "llama-3.1-8b": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    ),
    "smollm2-135m": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    ),
}
BLOCK = 16


class RandomReader:
    """Stands in for a checkpoint's reader: makes each weight when it is asked for."""

    def __init__(self, dtype: torch.dtype, sparsity: float, weights: str) -> None:
        self.checkpoint = SimpleNamespace(entries={"model.embed_tokens.weight": None})
        self.dtype = dtype
        self._sparsity, self._weights = sparsity, weights
        self._generator = torch.Generator("cuda").manual_seed(0)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device="cuda")
        return self._normal(shape)

    def linear(self, plan: Any) -> SparseLinear:
        weight = self._normal((plan.N, plan.K))
        if plan.name == "lm_head":  # pruning leaves it dense
            return SparseLinear(plan.name, weight, None, Format("dense", "not pruned"), weight.numel())
        # Not a product with a mask: that leaves -0.0, which is stored like any other value.
        weight[torch.rand(weight.shape, generator=self._generator, device="cuda") < self._sparsity] = 0
        nnz = int(torch.count_nonzero(weight))
        stored = choose_format(plan.N, plan.K, self.dtype, nnz, device="cuda", weights=self._weights)
        return SparseLinear(
            plan.name, weight if stored.name == "dense" else pack(weight, stored), None, stored, nnz
        )

    def check_all_used(self, ignored: object) -> None:
        """Nothing is ever left over."""

    def mark_used(self, name: str) -> None:
        """Nothing is counted."""

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device="cuda", dtype=self.dtype) * 0.02


def make_model(name: str, dtype: torch.dtype, sparsity: float, weights: str) -> NativeDecoder:
    """A model with random weights."""
    config = MODELS[name]
    spec = ModelSpec(
        architecture=config.architectures[0],
        implementation="native",
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        max_model_len=config.max_position_embeddings,
        dtype=dtype,
        device=torch.device("cuda"),
        eos_token_ids=(),
    )
    reader = RandomReader(dtype, sparsity, weights)
    return NativeDecoder(spec, config, make_plan(config, reader.checkpoint), reader)  # type: ignore[arg-type]


class CapturedStep:
    """A graph of one step, and the step itself: a graph holds addresses, so its inputs must stay."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        self.graph = captured(step)

    def seconds(self, replays: int) -> float:
        """Seconds of one replay."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        begin.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / replays / 1e3


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of a step that has run once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def decode_batch(M: int, context: int) -> ForwardBatch:
    """M sequences that decode at a context length."""
    blocks = -(-context // BLOCK)
    tables = torch.randperm(M * blocks, device="cuda", dtype=torch.int32).view(M, blocks)
    positions = torch.full((M,), context - 1, device="cuda")
    return ForwardBatch(
        token_ids=torch.randint(0, 1000, (M,), device="cuda"),
        positions=positions,
        slot_mapping=tables[:, -1].long() * BLOCK + positions % BLOCK,
        query_start=torch.arange(M + 1, dtype=torch.int32, device="cuda"),
        context_lens=torch.full((M,), context, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        logits_indices=torch.arange(M, device="cuda"),
    )


def prefill_batch(tokens: int) -> ForwardBatch:
    """One whole prompt."""
    blocks = -(-tokens // BLOCK)
    return ForwardBatch(
        token_ids=torch.randint(0, 1000, (tokens,), device="cuda"),
        positions=torch.arange(tokens, device="cuda"),
        slot_mapping=torch.arange(tokens, device="cuda"),
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor([tokens], dtype=torch.int32, device="cuda"),
        block_tables=torch.arange(blocks, dtype=torch.int32, device="cuda")[None],
        logits_indices=torch.tensor([tokens - 1], device="cuda"),
    )


class Contender:
    """One model, and its graphs."""

    def __init__(self, name: str, model_name: str, dtype: torch.dtype, sparsity: float, weights: str) -> None:
        self.name, self.sparsity = name, sparsity
        started = time.monotonic()
        self.model = make_model(model_name, dtype, sparsity, weights)
        self.make_seconds = time.monotonic() - started
        reports = self.model.layer_reports()
        pruned = [report for report in reports if report.name != "lm_head"]
        self.stored_bytes = sum(report.stored_bytes for report in pruned)
        self.dense_bytes = sum(report.dense_bytes for report in pruned)
        self.formats = sorted({report.format for report in pruned})

    def linears(self, M: int) -> Callable[[], None]:
        """All products of a step, in its order, on inputs of their own."""
        linears = list(self.model._linears())
        inputs = {
            K: torch.randn(M, K, device="cuda").to(self.model.spec.dtype)
            for K in {linear.K for linear in linears}
        }
        calls = [(linear.bind(M).call, inputs[linear.K]) for linear in linears]

        def run() -> None:
            for call, x in calls:
                call(x)

        return run


def measure(
    contenders: list[Contender], batches: list[int], context: int, prefill: int, rounds: int
) -> list[dict[str, Any]]:
    """Every contender at every batch size, interleaved."""
    most = max(max(batches) * -(-context // BLOCK), -(-prefill // BLOCK))
    rows = []
    for what, M in [*(("decode", M) for M in batches), *([("prefill", prefill)] if prefill else [])]:
        graphs, times = {}, {}
        cache = contenders[0].model.allocate_kv_cache(most, BLOCK)
        for keys, values in zip(cache.keys, cache.values, strict=True):
            keys.normal_()
            values.normal_()
        batch = decode_batch(M, context) if what == "decode" else prefill_batch(M)
        for contender in contenders:
            step = CapturedStep(functools.partial(contender.model.forward, batch, cache))
            linears = CapturedStep(contender.linears(M)) if what == "decode" else None
            graphs[contender.name] = (step, linears)
            times[contender.name] = ([], [])
        for round_ in range(rounds):
            for contender in contenders if round_ % 2 == 0 else contenders[::-1]:
                for graph, found in zip(graphs[contender.name], times[contender.name], strict=True):
                    if graph is not None:
                        found.append(graph.seconds(5 if what == "prefill" else 20))
        base = statistics.median(times[contenders[0].name][0])
        for contender in contenders:
            steps, linears = times[contender.name]
            row = {
                "what": what,
                "M": M,
                "contender": contender.name,
                "sparsity": contender.sparsity,
                "step_seconds": statistics.median(steps),
                "speedup": base / statistics.median(steps),
                "rounds_seconds": steps,
            }
            if linears:
                row["linears_seconds"] = statistics.median(linears)
                row["other_seconds"] = row["step_seconds"] - row["linears_seconds"]
            rows.append(row)
            milliseconds = row["step_seconds"] * 1e3
            print(
                f"{what} M={M:5d} {contender.name:12s} {milliseconds:8.3f} ms  x{row['speedup']:.2f}"
                + (
                    f"  linears {row['linears_seconds'] * 1e3:.3f} other {row['other_seconds'] * 1e3:.3f}"
                    if linears
                    else ""
                ),
                flush=True,
            )
        del graphs
    return rows


def main() -> None:
    """Make the models, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=512, help="tokens of every sequence")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt; 0 for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="recorded in the JSON; default: ask git")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.set_grad_enabled(False)
    contenders = [Contender("dense", options.model, dtype, 0.0, "dense")]
    contenders += [Contender(f"sparse-{s:.0%}", options.model, dtype, s, "auto") for s in options.sparsity]
    for contender in contenders:
        print(
            f"{contender.name}: {contender.stored_bytes / 1e9:.3f} of {contender.dense_bytes / 1e9:.3f} GB "
            f"dense ({', '.join(contender.formats)}), made in {contender.make_seconds:.1f} s",
            flush=True,
        )
    rows = measure(contenders, options.batch, options.context, options.prefill, options.rounds)
    if options.out:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        content = {
            "benchmark": "bench_decode",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": options.commit or git.stdout.strip() or "unknown",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": sys.argv,
            "model": options.model,
            "dtype": options.dtype,
            "context": options.context,
            "weights": [
                {"contender": c.name, "stored_bytes": c.stored_bytes, "dense_bytes": c.dense_bytes}
                for c in contenders
            ],
            "rows": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
