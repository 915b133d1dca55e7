"""Every speed and memory goal on an H200, what the committed results reached, and whether that meets it.

    python benchmarks/goals.py                 # exit status 1 if a goal is missed or was not measured
    python benchmarks/goals.py --write-readme  # also write the tables of the README

Needs the standard library alone. Each figure is taken from the newest file in benchmarks/results that has it:
files of bench_linear, bench_decode and bench_serve, told apart by what is in them.

Figures over layer shapes are geometric means of the speed-up over cuBLAS on the dense weights, in the same
run. They are those of this package's fastest backend for the case: what dispatch picks with a table of the
card.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- made by benchmarks/goals.py: begin -->", "<!-- made by benchmarks/goals.py: end -->"

SHAPES = {(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (8192, 28672)}
TOKENS = (1, 8, 16, 32, 64, 128, 256)
SPEEDUPS: dict[str, tuple[float | None, ...]] = {
    "30 %": (1.25, 1.25, 1.2, 1.15, 1.05, 0.95, None),
    "50 %": (1.5, 1.5, 1.4, 1.25, 1.15, 1.05, 0.95),
    "70 %": (1.75, 1.75, 1.6, 1.35, 1.2, 1.1, 1.0),
    "2:4": (1.85, 1.85, 1.75, 1.55, 1.45, 1.3, 1.2),
}
LARGE_TOKENS = (2048, 8192)
TWO_OF_FOUR_BACKENDS = ("semi_structured", "cusparselt")
# A weight of this many bytes when dense is large enough to be held to the roofline.
ROOFLINE_DENSE_BYTES = 60e6

Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A number that was reached, and the results file that says so."""

    value: float
    source: str


@dataclass(frozen=True)
class Goal:
    """One thing to reach.

    Attributes:
        name: what is measured.
        limit: what to reach.
        at_least: whether more is better.
        figure: what was reached; None where no results file has it.
        unit: behind both numbers.
    """

    name: str
    limit: float
    at_least: bool
    figure: Figure | None
    unit: str = ""

    @property
    def verdict(self) -> str:
        """met, missed, or not measured."""
        if self.figure is None:
            return "not measured"
        value = self.figure.value
        return "met" if (value >= self.limit if self.at_least else value <= self.limit) else "missed"

    def __str__(self) -> str:
        relation = ">=" if self.at_least else "<="
        reached = "-" if self.figure is None else f"{self.figure.value:.3g}{self.unit}"
        source = "" if self.figure is None else f"  {self.figure.source}"
        limit = f"{relation} {self.limit:g}{self.unit}"
        return f"{self.verdict:12s} {self.name:58s} {reached:>9s}  {limit:12s}{source}"


class Results:
    """All results files, the newest first."""

    def __init__(self, directory: Path) -> None:
        files = []
        for path in directory.glob("*.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            date = content.get("date") or content.get("about", {}).get("date") or path.name[:10]
            files.append((date, path.name, content))
        files.sort(key=lambda file: file[:2], reverse=True)
        self._files = [(name, content) for _, name, content in files]

    def newest(self, find: Callable[[dict[str, Any]], float | None]) -> Figure | None:
        """What `find` makes of the newest file from which it makes anything."""
        for name, content in self._files:
            value = find(content)
            if value is not None:
                return Figure(value, name)
        return None


def linear_rows(content: dict[str, Any], kind: str, tokens: int) -> dict[tuple[int, int], Row] | None:
    """The fastest backend's row for each of the six shapes; None unless the file has them all on an H200."""
    if "H200" not in str(content.get("about", {}).get("device")):
        return None
    found: dict[tuple[int, int], Row] = {}
    for row in content.get("results", ()):
        two_of_four = row["backend"].startswith(TWO_OF_FOUR_BACKENDS)
        if row["backend"].startswith("cublas") or row["M"] != tokens or two_of_four != (kind == "2:4"):
            continue
        if kind != "2:4" and f"{row['sparsity']:.0%}" != kind.replace(" ", ""):
            continue
        shape = (row["N"], row["K"])
        best = found.get(shape)
        if best is None or row["microseconds"] < best["microseconds"]:
            found[shape] = row
    return found if found.keys() >= SHAPES else None


def mean_speedup(kind: str, tokens: int) -> Callable[[dict[str, Any]], float | None]:
    """Geometric mean over the six shapes of the speed-up over cuBLAS."""

    def find(content: dict[str, Any]) -> float | None:
        rows = linear_rows(content, kind, tokens)
        if rows is None:
            return None
        return math.exp(
            sum(math.log(rows[shape]["speedup_over_cublas_dense"]) for shape in SHAPES) / len(SHAPES)
        )

    return find


def worst(
    kind: str,
    tokens: int,
    figure: Callable[[Row], float],
    choose: Callable[[Iterable[float]], float],
    large: bool = False,
) -> Callable[[dict[str, Any]], float | None]:
    """The worst shape's figure; with `large`, of the shapes that are held to the roofline."""

    def find(content: dict[str, Any]) -> float | None:
        rows = linear_rows(content, kind, tokens)
        if rows is None:
            return None
        return choose(
            figure(row) for (N, K), row in rows.items() if not large or N * K * 2 >= ROOFLINE_DENSE_BYTES
        )

    return find


def decode(contender: str, tokens: int, member: str, what: str = "decode") -> Callable[[Any], float | None]:
    """A figure of bench_decode on Llama-3.1-8B's shape."""

    def find(content: dict[str, Any]) -> float | None:
        if content.get("benchmark") != "bench_decode" or content["model"] != "llama-3.1-8b":
            return None
        if "H200" not in content["device"] or content["context"] != 512:
            return None
        for row in content["rows"]:
            if (row["what"], row["contender"], row["M"]) == (what, contender, tokens):
                value: float | None = row.get(member)
                return value
        return None

    return find


def stored_share(contender: str) -> Callable[[dict[str, Any]], float | None]:
    """Stored over dense bytes of the pruned layers in bench_decode."""

    def find(content: dict[str, Any]) -> float | None:
        if content.get("benchmark") != "bench_decode" or content["model"] != "llama-3.1-8b":
            return None
        for row in content["weights"]:
            if row["contender"] == contender:
                share: float = row["stored_bytes"] / row["dense_bytes"]
                return share
        return None

    return find


def http_share(concurrency: int) -> Callable[[dict[str, Any]], float | None]:
    """Tokens per second through HTTP over those of the engine alone."""

    def find(content: dict[str, Any]) -> float | None:
        if content.get("benchmark") != "bench_serve" or not content["device"].startswith("cuda"):
            return None
        for row in content["rows"]:
            if row["concurrency"] == concurrency:
                share: float = row["share"]
                return share
        return None

    return find


def scaled(figure: Figure | None, factor: float) -> Figure | None:
    """The figure in another unit."""
    return None if figure is None else Figure(figure.value * factor, figure.source)


def inverse(figure: Figure | None) -> Figure | None:
    """A time from a speed-up."""
    return None if figure is None else Figure(1 / figure.value, figure.source)


def linear_goals(results: Results) -> list[Goal]:
    """Layers alone, against cuBLAS."""
    goals = [
        Goal(f"{kind}, M={M}: speed-up over cuBLAS", limit, True, results.newest(mean_speedup(kind, M)), "x")
        for kind, limits in SPEEDUPS.items()
        for M, limit in zip(TOKENS, limits, strict=True)
        if limit is not None
    ]
    for M in (1, 8):
        share = results.newest(worst("50 %", M, lambda row: row["roofline_share"], min, large=True))
        goals.append(Goal(f"50 %, M={M}: share of the roofline, layers of 60 MB and more", 0.8, True, share))
    stored = results.newest(worst("50 %", 1, lambda row: row["stored_over_ideal"], max))
    goals.append(Goal("50 %: stored bytes over ideal", 1.05, False, stored, "x"))
    for M in LARGE_TOKENS:
        slower = inverse(results.newest(mean_speedup("50 %", M)))
        goals.append(Goal(f"50 %, M={M}: time over dense cuBLAS", 1.05, False, slower, "x"))
    for M in LARGE_TOKENS:
        goals.append(
            Goal(f"2:4, M={M}: speed-up over cuBLAS", 1.3, True, results.newest(mean_speedup("2:4", M)), "x")
        )
    return goals


def engine_goals(results: Results) -> list[Goal]:
    """Steps of a whole model, serving, memory."""

    def milliseconds(contender: str, M: int, member: str = "step_seconds") -> Figure | None:
        return scaled(results.newest(decode(contender, M, member)), 1e3)

    def speedup(M: int) -> Figure | None:
        return results.newest(decode("sparse-50%", M, "speedup"))

    goals = [
        Goal("8B, dense, M=1: step", 4.35, False, milliseconds("dense", 1), " ms"),
        Goal("8B, 50 %, M=1: step", 3.1, False, milliseconds("sparse-50%", 1), " ms"),
        Goal("8B, 50 %, M=1: over our dense", 1.4, True, speedup(1), "x"),
        Goal("8B, 70 %, M=1: step", 2.8, False, milliseconds("sparse-70%", 1), " ms"),
        Goal("8B, 50 %, M=16: over our dense", 1.3, True, speedup(16), "x"),
        Goal("8B, 50 %, M=64: over our dense", 1.15, True, speedup(64), "x"),
    ]
    for M, limit in ((1, 0.4), (64, 0.9)):
        other = milliseconds("sparse-50%", M, "other_seconds")
        goals.append(Goal(f"8B, 50 %, M={M}: step but for the linears", limit, False, other, " ms"))
    for count in (1, 16, 64):
        share = results.newest(http_share(count))
        goals.append(Goal(f"{count} at once: tokens/s through HTTP over the engine's", 0.92, True, share))
    prefill = inverse(results.newest(decode("sparse-50%", 2048, "speedup", "prefill")))
    goals.append(Goal("8B, 50 %: prefill of 2048 over our dense", 1.07, False, prefill, "x"))
    stored = results.newest(stored_share("sparse-50%"))
    goals.append(Goal("8B, 50 %: weights of pruned layers over dense", 0.6, False, stored, "x"))
    # No benchmark writes these two yet.
    goals.append(Goal("OPT-13B, 60 %, batch 8, 256 tokens: memory in all", 14.4, False, None, " GB"))
    goals.append(Goal("8B, packed checkpoint: start to ready", 30, False, None, " s"))
    return goals


def readme_tables(results: Results) -> str:
    """The README's tables: Markdown, a line end last."""
    columns = [M for M in TOKENS if any(results.newest(mean_speedup(kind, M)) for kind in SPEEDUPS)]
    lines = [
        "| sparsity | " + " | ".join(f"M={M}" for M in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for kind in SPEEDUPS:
        figures = [results.newest(mean_speedup(kind, M)) for M in columns]
        if any(figures):
            lines.append(
                f"| {kind} | " + " | ".join("-" if f is None else f"{f.value:.2f}" for f in figures) + " |"
            )
    contenders = [
        (name, contender)
        for name, contender in (("dense", "dense"), ("50 %", "sparse-50%"), ("70 %", "sparse-70%"))
        if results.newest(decode(contender, 1, "step_seconds"))
    ]
    if contenders:
        steps = [M for M in TOKENS if results.newest(decode("dense", M, "step_seconds"))]
        lines += [
            "",
            "Decode steps of Llama-3.1-8B's shape (random bf16 weights, context 512), ms, and speed-up over "
            "our dense:",
            "",
            "| weights | " + " | ".join(f"batch {M}" for M in steps) + " |",
            "|---" * (len(steps) + 1) + "|",
        ]
        for name, contender in contenders:
            cells = []
            for M in steps:
                seconds = results.newest(decode(contender, M, "step_seconds"))
                over = results.newest(decode(contender, M, "speedup"))
                cells.append(
                    "-" if not seconds or not over else f"{seconds.value * 1e3:.2f} ({over.value:.2f}x)"
                )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_tables(readme: str, tables: str) -> str:
    """The README with what is between the markers replaced.

    Raises:
        ValueError: the markers are missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main() -> int:
    """Print the goals; the exit status is 1 unless all are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of results files")
    parser.add_argument("--write-readme", action="store_true", help="bring the README's tables up to date")
    options = parser.parse_args()
    results = Results(options.results)
    goals = [*linear_goals(results), *engine_goals(results)]
    for goal in goals:
        print(goal)
    counts = {verdict: sum(goal.verdict == verdict for goal in goals) for verdict in ("met", "missed")}
    print(f"{counts['met']} met, {counts['missed']} missed, {len(goals) - sum(counts.values())} not measured")
    if options.write_readme:
        README.write_text(
            with_tables(README.read_text(encoding="utf-8"), readme_tables(results)), encoding="utf-8"
        )
    return 0 if counts["met"] == len(goals) else 1


if __name__ == "__main__":
    sys.exit(main())
