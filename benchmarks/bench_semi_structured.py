"""Time 2:4 weights against cuBLAS on this machine's GPU: the own kernel, and cuSPARSELt's best algorithm.

    python benchmarks/bench_semi_structured.py --out benchmarks/results/NAME.json

Method and output are those of bench_linear.py. `cublas_pruned` multiplies the same 2:4 weights, dense. The
roofline's bytes are the 1.125 an element that the form takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from bench_linear import (
    HEADER,
    SHAPES,
    Gpu,
    GraphedLaunches,
    Result,
    Round,
    commit,
    copies_for,
    geometric_means,
    row,
)
from torch import Tensor

from kernels_ext import semi_structured


def two_of_four(N: int, K: int, dtype: torch.dtype) -> Tensor:
    """A Gaussian weight with two of every four neighbours, at random places."""
    quads = torch.randn(N, K // 4, 4, device="cuda", dtype=dtype) * 0.05
    place = torch.rand(quads.shape, device="cuda").argsort(-1).argsort(-1)
    return quads.masked_fill_(place >= 2, 0).view(N, K)


def bench_case(
    N: int, K: int, tokens: list[int], dtype: torch.dtype, args: argparse.Namespace, gpu: Gpu
) -> list[Result]:
    """All backends and token counts of one weight."""
    copies = copies_for(N * K * 2)
    dense = [torch.randn(N, K, device="cuda", dtype=dtype) * 0.05 for _ in range(copies)]
    weight = two_of_four(N, K, dtype)
    pruned = [weight] + [weight.clone() for _ in range(copies - 1)]
    packed = semi_structured.semi_structured_pack(weight)
    sparse = [packed] + [
        semi_structured.SemiStructuredWeight(N, K, dtype, packed.data.clone())
        for _ in range(copies_for(packed.stored_bytes) - 1)
    ]
    library = semi_structured.cusparselt_pack(weight)
    libraries = [library] + [
        semi_structured.CuSparseLtWeight(N, K, library.packed.clone(), library.algorithms)
        for _ in range(copies_for(library.stored_bytes) - 1)
    ]
    workspace = semi_structured.semi_structured_workspace(packed)
    ideal = N * K * 1.125
    results = []
    for M in tokens:
        x = [
            torch.randn(M, K, device="cuda", dtype=dtype)
            for _ in range(max(copies, len(sparse), len(libraries)) if M <= 256 else 2)
        ]
        backends: dict[str, tuple[Callable[[int], Tensor], int, int]] = {
            "cublas_dense": (lambda i, x=x: x[i % len(x)] @ dense[i].T, copies, N * K * 2),
            "cublas_pruned": (lambda i, x=x: x[i % len(x)] @ pruned[i].T, copies, N * K * 2),
        }
        if M <= semi_structured.MAX_TOKENS:
            for name, overlap in (("semi_structured", True), ("semi_structured_no_overlap", False)):
                backends[name] = (
                    lambda i, x=x, overlap=overlap: semi_structured.semi_structured_linear(
                        x[i], sparse[i], workspace, overlap_launch=overlap
                    ),
                    len(sparse),
                    packed.stored_bytes,
                )
        if M >= 8:
            library.search(x[0])
            backends["cusparselt"] = (
                lambda i, x=x: semi_structured.cusparselt_linear(x[i % len(x)], libraries[i]),
                len(libraries),
                library.stored_bytes,
            )
        graphs = {name: GraphedLaunches(launch, count) for name, (launch, count, _) in backends.items()}
        rounds: dict[str, list[Round]] = {name: [] for name in graphs}
        for i in range(args.rounds):
            for name in list(graphs) if i % 2 == 0 else reversed(graphs):
                rounds[name].append(graphs[name].time(gpu, args.seconds))
        medians = {name: statistics.median(r.microseconds for r in rounds[name]) for name in graphs}
        want = x[0][:64].double() @ weight.double().T
        dense_error = (x[0][:64] @ weight.T - want).abs().max().item()
        for name, (launch, _, stored_bytes) in backends.items():
            error = 0.0
            if not name.startswith("cublas"):
                error = (launch(0)[:64] - want).abs().max().item() / dense_error
                if not error <= 2:
                    raise SystemExit(
                        f"{name} N={N} K={K} M={M}: {error:.2f} times as wrong as the dense matmul"
                    )
            times = [r.microseconds for r in rounds[name]]
            results.append(
                Result(
                    backend=name,
                    dtype=str(dtype).removeprefix("torch."),
                    M=M,
                    N=N,
                    K=K,
                    sparsity=0.5,
                    microseconds=medians[name],
                    fastest_microseconds=min(times),
                    slowest_microseconds=max(times),
                    speedup_over_cublas_dense=medians["cublas_dense"] / medians[name],
                    speedup_over_cublas_pruned=medians["cublas_pruned"] / medians[name],
                    stored_bytes=stored_bytes,
                    stored_over_ideal=stored_bytes / ideal,
                    bytes_per_second=stored_bytes / medians[name] * 1e6,
                    roofline_share=ideal / args.read_bytes_per_second / medians[name] * 1e6,
                    error_over_dense=error,
                    plan=packed.plan(M).numbers if name.startswith("semi_structured") else None,
                    rounds=rounds[name],
                )
            )
            print(row(results[-1]), flush=True)
        del graphs
    return results


def main() -> None:
    """Run the cases, print the table, write the JSON after every case so that a crash loses little."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--shapes", nargs="+", default=[f"{N}x{K}" for N, K in SHAPES], metavar="NxK")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each timed round (default 0.02)")
    parser.add_argument("--read-bytes-per-second", type=float, default=4.667e12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=None, help="recorded in the JSON; default: ask git")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_semi_structured: no CUDA device is visible to torch")
    torch.manual_seed(args.seed)
    gpu = Gpu()
    properties = torch.cuda.get_device_properties(0)
    about = {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": gpu.driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cusparselt": torch.backends.cusparselt.version(),
        "python": platform.python_version(),
        "commit": args.commit or commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "read_bytes_per_second": args.read_bytes_per_second,
    }
    results: list[Result] = []
    print(HEADER)
    for shape in args.shapes:
        N, K = (int(size) for size in shape.split("x"))
        results += bench_case(N, K, args.tokens, getattr(torch, args.dtype), args, gpu)
        torch.cuda.empty_cache()
        if args.out:
            document = {"about": about, "results": [asdict(r) for r in results]}
            args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(HEADER)
    print("\n".join(geometric_means(results)))


if __name__ == "__main__":
    main()
