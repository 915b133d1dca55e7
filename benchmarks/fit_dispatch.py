"""Measure which backend is fastest on this machine and write a dispatch table.

    python benchmarks/fit_dispatch.py                       # writes kernels_ext/tables/cpu_default.json
    python benchmarks/fit_dispatch.py --isa avx2 --out t.json

For each dtype, shape and bucket of M it times the package's kernel against torch's F.linear on the same
weight, in turn, and keeps each one's lowest tenth: other load on the machine only adds time. Once the kernel
takes GIVE_UP times as long as torch, larger M are left to the rule of thumb, which says the same.
On a machine that is busy with other work, --threads 1 keeps threads from waiting for each other.
Weights are rotated over more bytes than the caches hold, so they come from memory as they do in a model.
--isa also holds torch to that instruction set, so that a table for a lesser machine compares like with like.
--merge keeps the measurements of other instruction sets that the file already holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

# Decoder layers from SmolLM2-135M to 7B: qkv, o, gate_up, down.
SHAPES = [(576, 576), (3072, 576), (576, 1536), (4096, 4096)]
SPARSITIES = [0.3, 0.5, 0.7]
GIVE_UP = 3.0
TABLE = Path(__file__).parents[1] / "kernels_ext" / "tables" / "cpu_default.json"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=TABLE, help="the table to write")
    parser.add_argument("--isa", help="measure this instruction set instead of the machine's best")
    parser.add_argument("--merge", action="store_true", help="keep other instruction sets' measurements")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own choice")
    parser.add_argument("--seconds", type=float, default=0.15, help="time for each pair of backends")
    parser.add_argument("--cold-bytes", type=int, default=256 * 2**20, help="weights to rotate over")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float16"])
    return parser.parse_args()


def lowest_tenths(functions: list[Callable[[int], object]], rotate: int, seconds: float) -> list[float]:
    """Time the functions in turn; each is called with the number of the weight to use.

    They are half a rotation apart, so that none finds in a cache what another has just read.
    """
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds * len(functions)
    turn = 0
    while turn < 5 or time.perf_counter() < end:
        for position, (function, kept) in enumerate(zip(functions, times, strict=True)):
            weight = (turn + position * rotate // len(functions)) % rotate
            start = time.perf_counter()
            function(weight)
            kept.append(time.perf_counter() - start)
        turn += 1
    return [sorted(kept)[len(kept) // 10] for kept in times]


def main() -> None:
    arguments = parse_arguments()
    if arguments.isa == "avx2":  # read by torch and oneDNN when they load
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    import kernels_ext
    from kernels_ext import BitmapWeight
    from kernels_ext.dispatch import BUCKET_ENDS, m_bucket, parse_table

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    isa = arguments.isa or kernels_ext.cpu_isa()
    generator = torch.Generator().manual_seed(0)
    measurements: list[dict[str, object]] = []

    def dense_kernel(x: Tensor, weights: list[Tensor], i: int) -> Tensor:
        return kernels_ext.dense_linear(x, weights[i], isa=isa)

    def dense_torch(x: Tensor, weights: list[Tensor], i: int) -> Tensor:
        return F.linear(x, weights[i])

    def bitmap_kernel(x: Tensor, weights: list[BitmapWeight], i: int) -> Tensor:
        return kernels_ext.bitmap_linear(x, weights[i], isa=isa)

    def bitmap_torch(scratch: Tensor, x: Tensor, weights: list[BitmapWeight], i: int) -> Tensor:
        return F.linear(x, kernels_ext.bitmap_unpack(weights[i], out=scratch, isa=isa))

    def measure(format: str, N: int, K: int, dtype: torch.dtype, sparsity: float) -> None:
        rotate = max(2, arguments.cold_bytes // (N * K * dtype.itemsize))
        weight = torch.randn(N, K, generator=generator).to(dtype)
        weight.masked_fill_(torch.rand(N, K, generator=generator) < sparsity, 0.0)
        weights: list[Tensor] | list[BitmapWeight]
        if format == "dense":
            weights = [weight.clone() for _ in range(rotate)]
            kernel, torch_linear = dense_kernel, dense_torch
        else:
            weights = [kernels_ext.bitmap_pack(weight) for _ in range(rotate)]
            kernel, torch_linear = bitmap_kernel, partial(bitmap_torch, torch.empty_like(weight))
        for M in (*BUCKET_ENDS, 2 * BUCKET_ENDS[-1]):
            x = torch.randn(M, K, generator=generator).to(dtype)
            ours, theirs = lowest_tenths(
                [partial(kernel, x, weights), partial(torch_linear, x, weights)], rotate, arguments.seconds
            )
            measurements.append(
                {
                    "isa": isa,
                    "format": format,
                    "dtype": str(dtype).removeprefix("torch."),
                    "N": N,
                    "K": K,
                    "sparsity": sparsity,
                    "bucket": m_bucket(M),
                    "kernel_seconds": float(f"{ours:.3g}"),
                    "dense_seconds": float(f"{theirs:.3g}"),
                }
            )
            if ours > GIVE_UP * theirs:
                break

    with torch.inference_mode():
        for name in arguments.dtypes:
            for N, K in SHAPES:
                measure("dense", N, K, getattr(torch, name), 0.0)
                for sparsity in SPARSITIES:
                    measure("bitmap", N, K, getattr(torch, name), sparsity)
                print(f"{isa} {name} {N}x{K}: {len(measurements)} measurements", flush=True)

    if arguments.merge and arguments.out.exists():
        old = json.loads(arguments.out.read_text(encoding="utf-8"))
        replaced = {(m["isa"], m["dtype"]) for m in measurements}
        measurements = [
            m for m in old["measurements"] if (m["isa"], m["dtype"]) not in replaced
        ] + measurements
    table = {
        "version": 1,
        "made_by": "benchmarks/fit_dispatch.py",
        "made_on": datetime.now(UTC).date().isoformat(),
        "machine": {
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "read_bytes_per_second": float(f"{kernels_ext.measure_read_bandwidth(2.0):.3g}"),
        },
        "measurements": measurements,
    }
    parse_table(table, name=arguments.out.stem, isa=isa)
    lines = ",\n".join(f"    {json.dumps(m)}" for m in measurements)
    head = json.dumps({**table, "measurements": []}, indent=2)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        head.replace('"measurements": []', f'"measurements": [\n{lines}\n  ]') + "\n", encoding="utf-8"
    )
    print(f"wrote {arguments.out}: {len(measurements)} measurements")


def processor_name() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
