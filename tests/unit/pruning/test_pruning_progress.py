"""Progress where there is no terminal."""

from __future__ import annotations

import io
import re

import pytest

from service.pruning import progress as progress_module
from service.pruning.progress import shown_progress


def test_a_file_gets_a_line_per_tenth_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 reports over 10 s make 11 lines; at 30 % 7 of 10 s are left."""
    now = iter([i / 10 for i in range(1, 102)])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(now))
    stream = io.StringIO()
    with shown_progress(stream) as progress:
        for i in range(101):
            progress("pruning", i / 100)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "pruning:   0 %"
    assert lines[3] == "pruning:  30 %, 3 s, about 7 s left"
    assert lines[-1] == "pruning: 100 %, 10.0 s"


def test_a_new_step_starts_anew() -> None:
    """Two steps that report the same shares both show them."""
    stream = io.StringIO()
    with shown_progress(stream) as progress:
        for step in ("one", "two"):
            progress(step, 0.0)
            progress(step, 1.0)

    assert re.findall(r"(\w+): +(\d+) %", stream.getvalue()) == [
        ("one", "0"),
        ("one", "100"),
        ("two", "0"),
        ("two", "100"),
    ]


def test_a_terminal_gets_bars() -> None:
    """Each step its own, with the time left."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with shown_progress(stream) as progress:
        progress("converting", 0.5)
        progress("pruning", 1.0)

    assert "converting" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert "left" in stream.getvalue()
