"""Names and units of all metrics, and the state they take over from the engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.engine.protocol import EngineStats
from service.metrics import GpuMetrics, Metrics

BASE_UNITS = ("seconds", "bytes", "hertz", "watts", "joules", "celsius", "ratio")
FOREIGN_UNITS = re.compile(
    r"(_|^)(ms|us|ns|milli\w*|micro\w*|nano\w*|kilo\w*|mega\w*|giga\w*|mebi\w*|gibi\w*|kb|mb|gb|kib|mib|gib|mhz|ghz|"
    r"mw|mj|kwh|percent|pct|minutes|hours)(_|$)"
)


def families():
    metrics = Metrics()
    GpuMetrics(metrics.registry)
    return [family for family in metrics.registry.collect() if family.name.startswith("lacunar_")]


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_names_are_in_base_units(family):
    assert re.fullmatch(r"lacunar(_[a-z][a-z0-9]*)+", family.name)
    assert not FOREIGN_UNITS.search(family.name)
    assert len(family.documentation) > 15
    # A unit stands at the end, or before _total.
    for unit in BASE_UNITS:
        if f"_{unit}" in family.name:
            assert family.name.removesuffix("_per_second").endswith(f"_{unit}")
    if family.type == "histogram":
        assert family.name.endswith(("_seconds", "_tokens"))


@pytest.mark.parametrize("name", ["lacunar_wait_ms", "lacunar_memory_mebibytes", "lacunar_clock_mhz_total"])
def test_the_check_finds_foreign_units(name):
    assert FOREIGN_UNITS.search(name)


def test_metrics_are_defined_in_one_module_only():
    service = Path(__file__).parents[2] / "service"
    definition = re.compile(r"\b(Counter|Gauge|Histogram|Summary)\(")

    found = {path.name for path in service.rglob("*.py") if definition.search(path.read_text())}
    importers = {
        path.name for path in service.rglob("*.py") if "prometheus_client import" in path.read_text()
    }

    assert "metrics.py" in found
    assert importers == {"metrics.py"}


def test_counters_follow_the_engines_totals_and_never_fall():
    metrics = Metrics()
    for total in (3, 10, 7, 12):
        metrics.observe_stats(EngineStats(preemptions_total=total, linear_calls_total={"dense|1": total}))

    sample = metrics.registry.get_sample_value
    assert sample("lacunar_preemptions_total") == 12
    assert sample("lacunar_linear_calls_total", {"backend": "dense", "m_bucket": "1"}) == 12


def test_steps_are_observed_by_phase():
    metrics = Metrics()
    metrics.observe_stats(
        EngineStats(step_seconds=[("decode", 0.002, 8), ("decode", 0.004, 8), ("mixed", 1.0, 99)])
    )

    sample = metrics.registry.get_sample_value
    assert sample("lacunar_step_seconds_count", {"phase": "decode"}) == 2
    assert sample("lacunar_step_seconds_sum", {"phase": "decode"}) == pytest.approx(0.006)
    assert sample("lacunar_step_tokens_sum", {"phase": "mixed"}) == 99


def test_servers_do_not_share_counts():
    first, second = Metrics(), Metrics()
    first.requests.labels("completions").inc()

    assert second.registry.get_sample_value("lacunar_requests_total", {"endpoint": "completions"}) == 0
