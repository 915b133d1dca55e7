"""Time the ops around the linears of a Llama-3.1-8B-shaped decoder on a GPU, in CUDA graphs.

    python benchmarks/bench_decoder_ops.py [--out FILE]

Each op runs once a layer for 32 layers, with caches of 8 layers in turn, so that keys and values come from
memory and not from L2. `step` runs all five ops of every layer one after the other, as a decode step does,
without linears. Prefill is `paged_attention` alone on one prompt, beside torch's
scaled_dot_product_attention on contiguous keys and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels_ext import decoder_ops

H, HQ, HKV, D, F, LAYERS, BLOCK = 4096, 32, 8, 128, 14336, 32, 16
SETS = 8


def time_us(run: Callable[[], object], repeats: int = 7) -> float:
    """Median time of one replay of `run`, captured in a graph, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


class Decode:
    """Inputs of a decode step of M sequences."""

    def __init__(self, M: int, context: int, dtype: torch.dtype, table_blocks: int) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device="cuda")

        blocks = context // BLOCK
        self.x, self.residual, self.weight = normal(M, H), normal(M, H), normal(H)
        self.qkv, self.gate_up = normal(M, (HQ + 2 * HKV) * D), normal(M, 2 * F)
        self.q = normal(M, HQ, D)
        self.caches = [
            (normal(M * blocks, BLOCK, HKV, D), normal(M * blocks, BLOCK, HKV, D)) for _ in range(SETS)
        ]
        self.tables = torch.zeros(M, max(blocks, table_blocks), dtype=torch.int32, device="cuda")
        self.tables[:, :blocks] = torch.randperm(M * blocks, device="cuda").view(M, blocks)
        self.lens = torch.full((M,), context, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(M + 1, dtype=torch.int32, device="cuda")
        self.positions = self.lens.long() - 1
        self.slots = self.tables[:, blocks - 1].long() * BLOCK + BLOCK - 1
        self.angles = torch.randn(context, D, device="cuda")

    def norm(self, layer: int) -> Tensor:
        return decoder_ops.add_rms_norm(self.x, self.residual, self.weight, 1e-5)

    def rope(self, layer: int) -> Tensor:
        k, v = self.caches[layer % SETS]
        return decoder_ops.rope_kv_write(
            self.qkv, self.angles, self.angles, self.positions, self.slots, k, v, HQ
        )

    def attention(self, layer: int) -> Tensor:
        k, v = self.caches[layer % SETS]
        return decoder_ops.paged_attention(self.q, k, v, self.tables, self.starts, self.lens, D**-0.5)

    def silu(self, layer: int) -> Tensor:
        return decoder_ops.silu_mul(self.gate_up)

    def step(self, layer: int) -> None:
        for op in (self.norm, self.rope, self.attention, self.norm, self.silu):
            op(layer)


def bench_decode(M: int, context: int, dtype: torch.dtype, table_blocks: int) -> dict[str, float | int]:
    inputs = Decode(M, context, dtype, table_blocks)
    row: dict[str, float | int] = {"M": M, "context": context, "table_blocks": inputs.tables.shape[1]}
    for name in ("norm", "rope", "attention", "silu"):
        op = getattr(inputs, name)
        row[f"{name}_us"] = time_us(lambda op=op: [op(layer) for layer in range(LAYERS)]) / LAYERS
    row["step_us"] = time_us(lambda: [inputs.step(layer) for layer in range(LAYERS)])
    cache_bytes = 2 * M * context * HKV * D * dtype.itemsize
    row["attention_tb_per_second"] = cache_bytes / row["attention_us"] / 1e6
    return row


def bench_prefill(T: int, cached: int, dtype: torch.dtype) -> dict[str, float | int]:
    """T new tokens after `cached` earlier ones."""
    context = T + cached
    k, v = (torch.randn(context // BLOCK, BLOCK, HKV, D, dtype=dtype, device="cuda") for _ in range(2))
    q = torch.randn(T, HQ, D, dtype=dtype, device="cuda")
    tables = torch.randperm(context // BLOCK, device="cuda").int()[None]
    lens = torch.tensor([context], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, T], dtype=torch.int32, device="cuda")
    us = time_us(lambda: decoder_ops.paged_attention(q, k, v, tables, starts, lens, D**-0.5))
    operations = 4 * HQ * D * (T * cached + T * (T + 1) / 2)
    row: dict[str, float | int] = {
        "T": T,
        "cached": cached,
        "us": us,
        "tflop_per_second": operations / us / 1e6,
    }
    if cached == 0:
        keys, values = (
            t.view(T, HKV, D).transpose(0, 1)[None].repeat_interleave(HQ // HKV, 1) for t in (k, v)
        )
        queries = q.transpose(0, 1)[None]
        row["torch_us"] = time_us(
            lambda: torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        )
    return row


def show(row: dict[str, float | int]) -> None:
    print(
        "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument(
        "--table-blocks", type=int, nargs="+", default=[0, 512], help="width of the block table"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_decoder_ops: no CUDA device")
    dtype = getattr(torch, arguments.dtype)
    results: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "shape": {"H": H, "Hq": HQ, "Hkv": HKV, "D": D, "F": F, "layers": LAYERS, "block": BLOCK},
    }
    decode = results["decode"] = []
    prefill = results["prefill"] = []
    for M in arguments.batch:
        for context in arguments.context:
            for width in arguments.table_blocks:
                decode.append(bench_decode(M, context, dtype, width))
                show(decode[-1])
    for T in arguments.prefill:
        for cached in (0, 2048):
            prefill.append(bench_prefill(T, cached, dtype))
            show(prefill[-1])
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
