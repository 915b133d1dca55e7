"""Time the sparse linear kernels against cuBLAS on this machine's GPU.

    python benchmarks/bench_linear.py --out benchmarks/results/NAME.json

Method: every backend is a CUDA graph of many launches that rotates weights, activations and outputs over
far more memory than L2 holds. All backends of a case are timed in one process in interleaved rounds, in
alternating order; the figure is the median round. cuBLAS runs on the dense weights and on the pruned ones (a
power-limited chip multiplies zeros faster). NVML's SM clock, power and clock-event reasons are sampled in
every round; nothing here changes the card's settings. Data is Gaussian. Each result is compared with float64
and may be at most twice as wrong as the dense matmul.

Roofline: the fewest bytes that the bitmap form can take, 1/8 for an element and 2 for a non-zero, read at the
rate of --read-bytes-per-second; the default was measured on an H200 with bulk copies of 2 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch import Tensor

from kernels_ext import lane_stream

SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
ROTATED_BYTES = 700e6  # more than ten times an H200's L2
LEAST_LAUNCHES = 16  # of a graph, so that the gap between two replays counts little

Launch = Callable[[int], Tensor]


@dataclass
class Round:
    """One timed round of one backend."""

    microseconds: float
    sm_clock_hertz: float
    power_watts: float
    clock_event_reasons: int


@dataclass
class Result:
    """One backend on one case."""

    backend: str
    dtype: str
    M: int
    N: int
    K: int
    sparsity: float
    microseconds: float
    fastest_microseconds: float
    slowest_microseconds: float
    speedup_over_cublas_dense: float
    speedup_over_cublas_pruned: float
    stored_bytes: int
    stored_over_ideal: float
    bytes_per_second: float
    roofline_share: float
    error_over_dense: float
    plan: list[int] | None
    rounds: list[Round]


class Gpu:
    """What NVML says about the current device."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def sample(self) -> tuple[float, float, int]:
        """SM clock in hertz, power in watts, clock-event reasons."""
        return (
            pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM) * 1e6,
            pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3,
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle),
        )

    def driver(self) -> str:
        """The driver's version."""
        return str(pynvml.nvmlSystemGetDriverVersion())


class GraphedLaunches:
    """`count` launches in one CUDA graph."""

    def __init__(self, launch: Launch, copies: int) -> None:
        self.count = copies * math.ceil(LEAST_LAUNCHES / copies)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launch(0)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = [launch(i % copies) for i in range(self.count)]
        self.graph.replay()
        torch.cuda.synchronize()

    def time(self, gpu: Gpu, seconds: float) -> Round:
        """Replay for about that long; the mean of one launch."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        replays = max(2, math.ceil(seconds * 1e3 / start.elapsed_time(end)))
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        clock, power, reasons = gpu.sample()  # while the replays run
        end.synchronize()
        return Round(start.elapsed_time(end) * 1e3 / (replays * self.count), clock, power, reasons)


def gaussian(N: int, K: int, sparsity: float, dtype: torch.dtype) -> Tensor:
    """A weight with that share of zeros by chance."""
    weight = torch.randn(N, K, device="cuda", dtype=dtype) * 0.05
    return weight.masked_fill_(torch.rand(N, K, device="cuda") < sparsity, 0)


def copies_for(one_bytes: int) -> int:
    """How many copies of a weight to rotate."""
    return max(2, math.ceil(ROTATED_BYTES / one_bytes))


def bench_case(
    N: int, K: int, sparsity: float, tokens: list[int], dtype: torch.dtype, args: argparse.Namespace, gpu: Gpu
) -> list[Result]:
    """All backends and token counts of one weight."""
    dense_copies = copies_for(N * K * 2)
    dense = [gaussian(N, K, 0.0, dtype) for _ in range(dense_copies)]
    weight = gaussian(N, K, sparsity, dtype)
    pruned = [weight] + [weight.clone() for _ in range(dense_copies - 1)]
    packed = lane_stream.lane_stream_pack(weight)
    sparse = [packed] + [
        replace(packed, data=packed.data.clone(), descriptors=packed.descriptors.clone())
        for _ in range(copies_for(packed.stored_bytes) - 1)
    ]
    workspace = lane_stream.lane_stream_workspace(packed)
    ideal = N * K / 8 + packed.nnz * 2
    results = []
    for M in tokens:
        x = [torch.randn(M, K, device="cuda", dtype=dtype) for _ in range(max(dense_copies, len(sparse)))]
        backends: dict[str, tuple[Launch, int, int]] = {
            "cublas_dense": (lambda i, x=x: x[i] @ dense[i].T, dense_copies, N * K * 2),
            "cublas_pruned": (lambda i, x=x: x[i] @ pruned[i].T, dense_copies, N * K * 2),
        }
        if M <= lane_stream.MAX_CALL_TOKENS:
            for name, overlap in (("lane_stream", True), ("lane_stream_no_overlap", False)):
                backends[name] = (
                    lambda i, x=x, overlap=overlap: lane_stream.lane_stream_linear(
                        x[i], sparse[i], workspace, overlap_launch=overlap
                    ),
                    len(sparse),
                    packed.stored_bytes,
                )
        scratch = torch.empty(N, K, device="cuda", dtype=dtype)
        backends["unpack_cublas"] = (
            lambda i, x=x, scratch=scratch: x[i] @ lane_stream.lane_stream_unpack(sparse[i], scratch).T,
            len(sparse),
            packed.stored_bytes,
        )
        graphs = {name: GraphedLaunches(launch, copies) for name, (launch, copies, _) in backends.items()}
        rounds: dict[str, list[Round]] = {name: [] for name in graphs}
        for i in range(args.rounds):
            for name in list(graphs) if i % 2 == 0 else reversed(graphs):
                rounds[name].append(graphs[name].time(gpu, args.seconds))
        medians = {name: statistics.median(r.microseconds for r in rounds[name]) for name in graphs}

        want = x[0].double() @ weight.double().T
        dense_error = (x[0] @ weight.T - want).abs().max().item()
        for name, (launch, _, stored_bytes) in backends.items():
            error = 0.0
            if name.startswith("lane_stream"):
                error = (launch(0) - want).abs().max().item() / dense_error
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
                    sparsity=sparsity,
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
                    plan=packed.plan.numbers if name.startswith("lane_stream") else None,
                    rounds=rounds[name],
                )
            )
            print(row(results[-1]), flush=True)
        del graphs
    return results


HEADER = (
    f"{'backend':<23}{'M':>4} {'N x K':>13} {'zeros':>6} {'us':>8} {'/dense':>7} {'/pruned':>8} "
    f"{'TB/s':>6} {'roof':>5} {'stored':>7} {'error':>6} {'MHz':>5} {'W':>4}"
)


def row(r: Result) -> str:
    """One line of the table."""
    clock = statistics.median(s.sm_clock_hertz for s in r.rounds) / 1e6
    power = statistics.median(s.power_watts for s in r.rounds)
    return (
        f"{r.backend:<23}{r.M:>4} {f'{r.N}x{r.K}':>13} {r.sparsity:>6.0%} {r.microseconds:>8.2f} "
        f"{r.speedup_over_cublas_dense:>6.2f}x {r.speedup_over_cublas_pruned:>7.2f}x "
        f"{r.bytes_per_second / 1e12:>6.2f} {r.roofline_share:>5.0%} {r.stored_over_ideal:>6.3f}x "
        f"{r.error_over_dense:>6.2f} {clock:>5.0f} {power:>4.0f}"
    )


def geometric_means(results: list[Result]) -> list[str]:
    """Per sparsity and M: the mean speedup over the shapes."""
    lines = []
    for sparsity in dict.fromkeys(r.sparsity for r in results):
        for M in dict.fromkeys(r.M for r in results):
            for backend in dict.fromkeys(r.backend for r in results if not r.backend.startswith("cublas")):
                of = [r for r in results if (r.sparsity, r.M, r.backend) == (sparsity, M, backend)]
                if of:
                    dense = statistics.geometric_mean(r.speedup_over_cublas_dense for r in of)
                    pruned = statistics.geometric_mean(r.speedup_over_cublas_pruned for r in of)
                    lines.append(
                        f"{backend:<23}{M:>4} {f'{len(of)} shapes':>13} {sparsity:>6.0%} {'':>8} "
                        f"{dense:>6.2f}x {pruned:>7.2f}x"
                    )
    return lines


def plot(results: list[Result], folder: Path) -> None:
    """Mean speedup over M (one picture a sparsity) and over sparsity (one picture an M), as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    backends = [b for b in dict.fromkeys(r.backend for r in results) if b != "cublas_dense"]
    sparsities, tokens = (sorted({getattr(r, name) for r in results}) for name in ("sparsity", "M"))

    def mean(backend: str, sparsity: float, M: int) -> float:
        of = [r for r in results if (r.backend, r.sparsity, r.M) == (backend, sparsity, M)]
        return statistics.geometric_mean(r.speedup_over_cublas_dense for r in of) if of else math.nan

    def draw(name: str, title: str, label: str, over: list[Any], curves: dict[str, list[float]]) -> None:
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for backend, speedups in curves.items():
            axes.plot(range(len(over)), speedups, marker="o", label=backend)
        axes.set_xticks(range(len(over)), [str(value) for value in over])
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(xlabel=label, ylabel="speed relative to cuBLAS, geometric mean", title=title)
        axes.legend()
        figure.tight_layout()
        figure.savefig(folder / name, dpi=150)
        pyplot.close(figure)

    for sparsity in sparsities:
        curves = {b: [mean(b, sparsity, M) for M in tokens] for b in backends}
        draw(f"linear-{sparsity:.0%}.png".replace("%", ""), f"{sparsity:.0%} zeros", "tokens", tokens, curves)
    for M in tokens:
        curves = {b: [mean(b, s, M) for s in sparsities] for b in backends}
        draw(f"linear-M{M}.png", f"M = {M}", "share of zeros", sparsities, curves)


def commit() -> str:
    """The commit of the checkout, "unknown" outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def main() -> None:
    """Run the cases, print the table, write the JSON after every case so that a crash loses little."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256], metavar="M")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[f"{N}x{K}" for N, K in SHAPES],
        metavar="NxK",
        help="out features x in features",
    )
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each timed round (default 0.02)")
    parser.add_argument("--read-bytes-per-second", type=float, default=4.667e12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=None, help="recorded in the JSON; default: ask git")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, default=None, metavar="FOLDER", help="plots; needs matplotlib")
    parser.add_argument("--plot-only", type=Path, default=None, metavar="FILE.json", help="plot a stored run")
    args = parser.parse_args()
    if args.plot_only:
        stored = json.loads(args.plot_only.read_text())["results"]
        plot([Result(**{**r, "rounds": []}) for r in stored], args.plot or args.plot_only.parent)
        return
    if not torch.cuda.is_available():
        raise SystemExit("bench_linear: no CUDA device is visible to torch")
    torch.manual_seed(args.seed)
    gpu = Gpu()
    properties = torch.cuda.get_device_properties(0)
    about: dict[str, Any] = {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": gpu.driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": args.commit or commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "read_bytes_per_second": args.read_bytes_per_second,
    }
    results: list[Result] = []
    print(HEADER)
    for sparsity in args.sparsity:
        for shape in args.shapes:
            N, K = (int(size) for size in shape.split("x"))
            results += bench_case(N, K, sparsity, args.tokens, getattr(torch, args.dtype), args, gpu)
            torch.cuda.empty_cache()
            if args.out:
                document = {"about": about, "results": [asdict(r) for r in results]}
                args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(HEADER)
    print("\n".join(geometric_means(results)))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
