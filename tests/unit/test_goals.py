"""The list of goals: figures from results files, verdicts, and the README's tables."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "goals.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("goals", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["goals"] = module
    spec.loader.exec_module(module)
    return module


goals = load()


def linear(date: str, speedup: float, *, shapes: Any = goals.SHAPES, **changes: Any) -> dict[str, Any]:
    rows = [
        {
            "backend": "lane_stream",
            "M": 1,
            "N": N,
            "K": K,
            "sparsity": 0.5,
            "microseconds": 10.0,
            "speedup_over_cublas_dense": speedup,
            "roofline_share": 0.7 if N * K * 2 < 60e6 else 0.85,
            "stored_over_ideal": 1.04,
            **changes,
        }
        for N, K in shapes
    ]
    return {"about": {"device": "NVIDIA H200", "date": date}, "results": rows}


def results(tmp_path: Path, *contents: dict[str, Any]) -> Any:
    for index, content in enumerate(contents):
        (tmp_path / f"{index}.json").write_text(json.dumps(content))
    return goals.Results(tmp_path)


def named(made: list[Any], name: str) -> Any:
    (goal,) = [goal for goal in made if goal.name == name]
    return goal


def test_the_newest_file_with_all_shapes_counts(tmp_path: Path) -> None:
    found = results(
        tmp_path,
        linear("2026-12-01T01:00:00Z", 1.4),
        linear("2026-12-01T02:00:00Z", 1.6),
        linear("2026-12-01T03:00:00Z", 9.0, shapes=[(4096, 4096)]),
    )
    goal = named(goals.linear_goals(found), "50 %, M=1: speed-up over cuBLAS")
    assert goal.figure.value == pytest.approx(1.6)
    assert (goal.figure.source, goal.verdict) == ("1.json", "met")


def test_the_fastest_backend_counts_but_not_cublas_nor_another_pattern(tmp_path: Path) -> None:
    content = linear("2026-12-01", 1.2)
    for change in (
        {"backend": "unpack_cublas", "microseconds": 9.0, "speedup_over_cublas_dense": 1.3},
        {"backend": "cublas_pruned", "microseconds": 1.0, "speedup_over_cublas_dense": 5.0},
        {"backend": "semi_structured", "microseconds": 1.0, "speedup_over_cublas_dense": 6.0},
    ):
        content["results"] += linear("", 0.0, **change)["results"]
    made = goals.linear_goals(results(tmp_path, content))
    assert named(made, "50 %, M=1: speed-up over cuBLAS").figure.value == pytest.approx(1.3)
    assert named(made, "2:4, M=1: speed-up over cuBLAS").figure.value == pytest.approx(6.0)


def test_the_roofline_is_for_large_layers_and_the_worst_of_them(tmp_path: Path) -> None:
    made = goals.linear_goals(results(tmp_path, linear("2026-12-01", 1.5)))
    share = named(made, "50 %, M=1: share of the roofline, layers of 60 MB and more")
    assert (share.figure.value, share.verdict) == (0.85, "met")
    assert named(made, "50 %: stored bytes over ideal").verdict == "met"


def test_steps_are_held_to_their_limits(tmp_path: Path) -> None:
    rows = [
        {"what": "decode", "M": 1, "contender": "dense", "step_seconds": 0.0045, "speedup": 1.0},
        {"what": "decode", "M": 1, "contender": "sparse-50%", "step_seconds": 0.003, "speedup": 1.5},
        {"what": "prefill", "M": 2048, "contender": "sparse-50%", "step_seconds": 0.06, "speedup": 0.95},
    ]
    found = results(
        tmp_path,
        {
            "benchmark": "bench_decode",
            "date": "2026-12-01",
            "device": "NVIDIA H200",
            "model": "llama-3.1-8b",
            "context": 512,
            "weights": [{"contender": "sparse-50%", "stored_bytes": 58, "dense_bytes": 100}],
            "rows": rows,
        },
    )
    made = goals.engine_goals(found)
    verdicts = {goal.name: goal.verdict for goal in made if goal.figure is not None}
    assert verdicts == {
        "8B, dense, M=1: step": "missed",
        "8B, 50 %, M=1: step": "met",
        "8B, 50 %, M=1: over our dense": "met",
        "8B, 50 %: prefill of 2048 over our dense": "met",
        "8B, 50 %: weights of pruned layers over dense": "met",
    }
    assert "| 50 % | 3.00 (1.50x) |" in goals.readme_tables(found)


def test_what_was_not_measured_fails_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--results", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "0 met, 0 missed" in done.stdout
    assert "not measured 50 %, M=1: speed-up over cuBLAS" in done.stdout


def test_the_readmes_tables_are_those_of_the_committed_results() -> None:
    """`python benchmarks/goals.py --write-readme` brings them up to date."""
    readme = goals.README.read_text(encoding="utf-8")
    assert goals.with_tables(readme, goals.readme_tables(goals.Results(goals.RESULTS))) == readme
