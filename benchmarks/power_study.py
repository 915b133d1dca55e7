"""Does a GPU multiply zeros faster? Dense bf16 matmuls whose weights hold more and more zeros.

    python benchmarks/power_study.py --out benchmarks/results/NAME.json [--plot FILE.png]

cuBLAS does the same work whatever the values are, but fewer bits change from product to product, so a chip
that is held back by its power limit may clock higher. Method: for each M a CUDA graph for every share of
zeros, each rotating 8 copies of an 8192 x 8192 weight; the graphs are timed in interleaved rounds, in
alternating order; the figure is the median round. NVML's SM clock, power and clock-event reasons are sampled
while a round runs.

Clocks are left alone. `--lock-clocks MHZ` runs the study with the SM clock locked (needs root; for your own
card), which shows how much of an effect the clock explains; the lock is lifted at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pynvml
import torch
from bench_linear import Gpu, GraphedLaunches, Round, commit, gaussian

COPIES = 8


@dataclass
class Result:
    """One share of zeros at one M."""

    M: int
    zeros: float
    microseconds: float
    teraflops: float
    speedup: float  # over no zeros at the same M
    sm_clock_hertz: float
    power_watts: float
    clock_event_reasons: list[int]
    rounds: list[Round]


@contextlib.contextmanager
def locked_clock(gpu: Gpu, megahertz: int | None) -> Iterator[None]:
    """The SM clock locked while the block runs, or nothing at all."""
    if megahertz is None:
        yield
        return
    pynvml.nvmlDeviceSetGpuLockedClocks(gpu.handle, megahertz, megahertz)
    try:
        yield
    finally:
        pynvml.nvmlDeviceResetGpuLockedClocks(gpu.handle)


def study(
    M: int, size: int, shares: list[float], weights: dict[float, list[torch.Tensor]], args: Any, gpu: Gpu
) -> list[Result]:
    """Every share of zeros at one M."""
    x = [torch.randn(M, size, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES if M <= 2048 else 2)]
    y = torch.empty(M, size, device="cuda", dtype=torch.bfloat16)

    def graph(share: float) -> GraphedLaunches:
        of = weights[share]
        return GraphedLaunches(lambda i: torch.mm(x[i % len(x)], of[i].T, out=y), COPIES)

    graphs = {share: graph(share) for share in shares}
    rounds: dict[float, list[Round]] = {share: [] for share in shares}
    for i in range(args.rounds):
        for share in shares if i % 2 == 0 else reversed(shares):
            rounds[share].append(graphs[share].time(gpu, args.seconds))
    medians = {share: statistics.median(r.microseconds for r in rounds[share]) for share in shares}
    return [
        Result(
            M=M,
            zeros=share,
            microseconds=medians[share],
            teraflops=2 * M * size * size / medians[share] / 1e6,
            speedup=medians[shares[0]] / medians[share],
            sm_clock_hertz=statistics.median(r.sm_clock_hertz for r in rounds[share]),
            power_watts=statistics.median(r.power_watts for r in rounds[share]),
            clock_event_reasons=sorted({r.clock_event_reasons for r in rounds[share]}),
            rounds=rounds[share],
        )
        for share in shares
    ]


def plot(results: list[Result], path: Path) -> None:
    """Speedup over the share of zeros, a line for each M."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for M in dict.fromkeys(r.M for r in results):
        of = [r for r in results if r.M == M]
        axes.plot([100 * r.zeros for r in of], [r.speedup for r in of], marker="o", label=f"M = {M}")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("zeros in the weight, %")
    axes.set_ylabel("speed relative to no zeros")
    axes.set_title("cuBLAS bf16, 8192 x 8192")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the study, print the table, write the JSON after every M."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 16, 128, 1024, 2048, 4096, 8192, 16384], metavar="M"
    )
    parser.add_argument("--zeros", type=float, nargs="+", default=[0, 0.05, 0.1, 0.25, 0.5, 0.7, 0.9, 0.99])
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the weight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each timed round (default 0.1)")
    parser.add_argument("--lock-clocks", type=int, default=None, metavar="MHZ", help="off by default")
    parser.add_argument("--commit", default=None, help="recorded in the JSON; default: ask git")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.png", help="needs matplotlib")
    parser.add_argument(
        "--plot-only", type=Path, default=None, metavar="FILE.json", help="plot an earlier run"
    )
    args = parser.parse_args()
    if args.plot_only:
        stored = json.loads(args.plot_only.read_text())["results"]
        plot([Result(**{**r, "rounds": []}) for r in stored], args.plot or args.plot_only.with_suffix(".png"))
        return
    if not torch.cuda.is_available():
        raise SystemExit("power_study: no CUDA device is visible to torch")
    torch.manual_seed(0)
    gpu = Gpu()
    about = {
        "device": torch.cuda.get_device_properties(0).name,
        "driver": gpu.driver(),
        "power_limit_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu.handle) / 1e3,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": args.commit or commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "locked_clock_megahertz": args.lock_clocks,
    }
    shares = sorted(args.zeros)
    weights = {
        share: [gaussian(args.size, args.size, share, torch.bfloat16) for _ in range(COPIES)]
        for share in shares
    }
    results: list[Result] = []
    print(f"{'M':>6} {'zeros':>6} {'us':>9} {'TFLOP/s':>8} {'speed':>6} {'MHz':>5} {'W':>4} reasons")
    with locked_clock(gpu, args.lock_clocks):
        for M in args.tokens:
            results += study(M, args.size, shares, weights, args, gpu)
            for r in results[-len(shares) :]:
                reasons = " ".join(hex(reason) for reason in r.clock_event_reasons)
                print(
                    f"{r.M:>6} {r.zeros:>6.0%} {r.microseconds:>9.2f} {r.teraflops:>8.1f} {r.speedup:>5.3f}x "
                    f"{r.sm_clock_hertz / 1e6:>5.0f} {r.power_watts:>4.0f} {reasons}",
                    flush=True,
                )
            torch.cuda.empty_cache()
            if args.out:
                args.out.write_text(
                    json.dumps({"about": about, "results": [asdict(r) for r in results]}, indent=1) + "\n"
                )
    assert all(math.isfinite(r.speedup) for r in results)
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
