"""Perplexity and time of every pruning method on one model; prints the table of docs/pruning.md.

    python benchmarks/pruning_quality.py MODEL [--json FILE]

Held-out and calibration text are those that are shipped. Each pruned model is measured from its packed
directory, so the figures are those of what is served.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from service.model.loader import load_model
from service.pruning.pack import pack
from service.pruning.progress import shown_progress
from service.pruning.prune import PruneOptions, prune
from service.pruning.report import PerplexityOptions, perplexity

RUNS: dict[str, dict[str, Any]] = {
    "Wanda, 30 %": {"method": "wanda", "sparsity": 0.3},
    "Wanda, 50 %": {"method": "wanda", "sparsity": 0.5},
    "SparseGPT, 50 %": {"method": "sparsegpt", "sparsity": 0.5},
    "Wanda, 2:4": {"method": "wanda", "pattern": "2:4"},
    "SparseGPT, 2:4": {"method": "sparsegpt", "pattern": "2:4"},
    "magnitude, 50 %": {"method": "magnitude", "sparsity": 0.5},
}


def main() -> None:
    """Run everything and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = PerplexityOptions()
    rows: list[dict[str, Any]] = []
    with shown_progress(sys.stderr) as progress, tempfile.TemporaryDirectory() as name:
        dense = perplexity(arguments.model, options, progress, name="dense")
        rows.append({"weights": "dense", "perplexity": dense.perplexity, "sparsity": 0.0})
        for label, values in RUNS.items():
            out = Path(name) / "out"
            report = prune(arguments.model, out, PruneOptions(**values), progress)
            seconds = report.seconds
            figure = perplexity(out, options, progress, name=label)
            plain = Path(name) / "plain"
            begin = time.monotonic()
            load_model(out)
            loading = time.monotonic() - begin
            prune_again = None
            if label == "Wanda, 50 %":
                from service.pruning.pack import unpack

                unpack(out, plain)
                begin = time.monotonic()
                pack(plain, Path(name) / "packed")
                prune_again = time.monotonic() - begin
            rows.append(
                {
                    "weights": label,
                    "perplexity": figure.perplexity,
                    "sparsity": report.sparsity,
                    "prune_seconds": seconds["prune"],
                    "write_seconds": seconds["write"],
                    "load_seconds": loading,
                    "pack_seconds": prune_again,
                    "load_average": os.getloadavg()[0],
                }
            )
            for file in sorted(out.rglob("*"), reverse=True):
                file.unlink()
            out.rmdir()
    print("| weights | sparsity | perplexity | against dense | pruning, s | writing, s | loading, s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        times = [row.get(key) for key in ("prune_seconds", "write_seconds", "load_seconds")]
        shown = " | ".join("" if value is None else f"{value:.1f}" for value in times)
        print(
            f"| {row['weights']} | {row['sparsity']:.4f} | {row['perplexity']:.1f} | "
            f"{row['perplexity'] / dense.perplexity:.2f}x | {shown} |"
        )
    if arguments.json is not None:
        result = {
            "command": " ".join(["python", "benchmarks/pruning_quality.py", arguments.model.name]),
            "machine": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "text": options.text.name,
            "context_tokens": options.context_tokens,
            "predicted_tokens": dense.predicted_tokens,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
