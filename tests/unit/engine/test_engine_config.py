"""Settings that cannot work stop the start and name themselves; the machine's limits are respected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from service.engine.config import EngineConfig, Launch
from service.engine.resources import available_memory_bytes, usable_threads
from service.errors import SettingsError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_num_sequences", 0),
        ("max_step_tokens", 63),
        ("max_queue", -1),
        ("kv_block_size", 0),
        ("kv_cache_bytes", 0),
        ("threads", 0),
        ("model_factory", "module"),
        ("model_factory", ":function"),
    ],
)
def test_impossible_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name) as caught:
        EngineConfig(model="m", **{name: value})
    assert caught.value.param == name


def test_least_settings_are_allowed() -> None:
    EngineConfig(model="m", max_num_sequences=1, max_step_tokens=1, max_queue=0, kv_block_size=1, threads=1)


def test_launch_survives_the_way_to_the_engine() -> None:
    launch = Launch(
        config=EngineConfig(model="m", kv_cache_bytes=10, seed=3),
        commands="ipc:///a",
        outputs="ipc:///b",
        parent_pid=7,
        log_level=20,
    )
    assert msgspec.json.decode(msgspec.json.encode(launch), type=Launch) == launch


@pytest.mark.parametrize(
    ("quota", "most"),
    [("max 100000\n", None), ("100000 100000\n", 1), ("50000 100000\n", 1), ("99900000 100000\n", None)],
)
def test_threads_respect_the_cpu_quota(tmp_path: Path, quota: str, most: int | None) -> None:
    without = usable_threads(tmp_path)
    assert 1 <= without <= (psutil.cpu_count() or 1)
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_threads(tmp_path) == (without if most is None else most)


@pytest.mark.parametrize(("limit", "used", "left"), [("1000000", "400000", 600000), ("1000", "4000", 0)])
def test_memory_respects_the_containers_limit(tmp_path: Path, limit: str, used: str, left: int) -> None:
    assert available_memory_bytes(tmp_path) > 1_000_000
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert available_memory_bytes(tmp_path) == left


def test_memory_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert available_memory_bytes(tmp_path) > 1_000_000
