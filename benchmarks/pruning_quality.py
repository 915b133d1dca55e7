"""Perplexity of every pruning method on one model; prints the table of docs/pruning.md.

    python benchmarks/pruning_quality.py MODEL --json FILE [--only "Wanda, 50 %"]

Rows that FILE has already are kept, so that an interrupted run goes on where it stopped.

Held-out and calibration text are those that are shipped. Each pruned model is measured from its packed
directory, so the figures are those of what is served.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from service.pruning.progress import shown_progress
from service.pruning.prune import PruneOptions, prune
from service.pruning.report import PerplexityOptions, perplexity

DENSE = "dense"
RUNS: dict[str, dict[str, Any]] = {
    "Wanda, 30 %": {"method": "wanda", "sparsity": 0.3},
    "Wanda, 50 %": {"method": "wanda", "sparsity": 0.5},
    "SparseGPT, 50 %": {"method": "sparsegpt", "sparsity": 0.5},
    "Wanda, 2:4": {"method": "wanda", "pattern": "2:4"},
    "SparseGPT, 2:4": {"method": "sparsegpt", "pattern": "2:4"},
    "magnitude, 50 %": {"method": "magnitude", "sparsity": 0.5},
}


def measured(model: Path, label: str, options: PerplexityOptions) -> dict[str, Any]:
    """Prune by one method and measure what comes out: one row of the table."""
    with shown_progress(sys.stderr) as progress, tempfile.TemporaryDirectory() as name:
        if label == DENSE:
            figure = perplexity(model, options, progress, name=label)
            return {
                "weights": label,
                "perplexity": figure.perplexity,
                "sparsity": 0.0,
                "predicted_tokens": figure.predicted_tokens,
                "load_average": os.getloadavg()[0],
            }
        out = Path(name) / "out"
        report = prune(model, out, PruneOptions(**RUNS[label]), progress)
        figure = perplexity(out, options, progress, name=label)
        return {
            "weights": label,
            "perplexity": figure.perplexity,
            "sparsity": report.sparsity,
            "predicted_tokens": figure.predicted_tokens,
            "prune_seconds": report.seconds["prune"],
            "write_seconds": report.seconds["write"],
            "load_average": os.getloadavg()[0],
        }


def main() -> None:
    """Measure what the results file has no row of yet, and print all of it as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="results; rows that it has are kept")
    parser.add_argument("--only", action="append", choices=[DENSE, *RUNS], help="measure these rows alone")
    arguments = parser.parse_args()
    options = PerplexityOptions()
    result: dict[str, Any] = {
        "command": f"python benchmarks/pruning_quality.py {arguments.model.name} --json RESULTS",
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "text": options.text.name,
        "context_tokens": options.context_tokens,
        "rows": [],
    }
    if arguments.json.exists():
        result["rows"] = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
    order = [DENSE, *RUNS]
    for label in arguments.only or order:
        if any(row["weights"] == label for row in result["rows"]):
            continue
        result["rows"].append(measured(arguments.model, label, options))
        result["rows"].sort(key=lambda row: order.index(row["weights"]))
        # After every row, so that an interrupted run loses only the row it was at.
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    dense = next((row["perplexity"] for row in result["rows"] if row["weights"] == DENSE), math.nan)
    print("| weights | sparsity | perplexity | against dense |")
    print("|---|---|---|---|")
    for row in result["rows"]:
        print(
            f"| {row['weights']} | {row['sparsity']:.4f} | {row['perplexity']:.1f} | "
            f"{row['perplexity'] / dense:.2f}x |"
        )


if __name__ == "__main__":
    main()
