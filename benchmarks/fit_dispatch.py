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
from datetime import UTC, datetime
from pathlib import Path

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


def main() -> None:
    arguments = parse_arguments()
    if arguments.isa == "avx2":  # read by torch and oneDNN when they load
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    import torch

    import kernels_ext
    from kernels_ext import tune

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    isa = arguments.isa or kernels_ext.cpu_isa()
    generator = torch.Generator().manual_seed(0)
    measurements: list[dict[str, object]] = []

    def measure(format: str, N: int, K: int, dtype: torch.dtype, sparsity: float) -> None:
        weight = tune.pruned_weight(N, K, dtype, sparsity, generator)
        measurements.extend(
            tune.measure_cpu(
                format,
                weight,
                sparsity,
                seconds=arguments.seconds,
                cold_bytes=arguments.cold_bytes,
                isa=isa,
            )
        )

    with torch.inference_mode():
        for name in arguments.dtypes:
            for N, K in tune.CPU_SHAPES:
                measure("dense", N, K, getattr(torch, name), 0.0)
                for sparsity in tune.SPARSITIES:
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
            "processor": tune.processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "read_bytes_per_second": float(f"{kernels_ext.measure_read_bandwidth(2.0):.3g}"),
        },
        "measurements": measurements,
    }
    tune.write_table(arguments.out, table)
    print(f"wrote {arguments.out}: {len(measurements)} measurements")


if __name__ == "__main__":
    main()
