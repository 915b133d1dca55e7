"""How long steps report progress, and how a person sees it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Progress = Callable[[str, float], None]
"""Called with the step's name and the share of it that is done (0..1). A new name starts a new step."""


def no_progress(step: str, fraction: float) -> None:
    """Report to nobody."""


@contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show each step on a terminal as a bar with the time left, elsewhere as a line per tenth.

    Args:
        stream: where to write; standard error when None.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _Lines(stream)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        TaskID,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    tasks: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(file=stream)) as bars:

        def report(step: str, fraction: float) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=1.0)
            bars.update(tasks[step], completed=fraction)

        yield report


class _Lines:
    """One line per tenth of a step, with the time left judged from the time spent."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._step = ""
        self._begin = 0.0
        self._tenths = -1

    def __call__(self, step: str, fraction: float) -> None:
        now = time.monotonic()
        if step != self._step:
            self._step, self._begin, self._tenths = step, now, -1
        tenths = int(fraction * 10 + 1e-9)
        if tenths <= self._tenths:
            return
        self._tenths = tenths
        spent = now - self._begin
        if fraction <= 0:
            tail = ""
        elif fraction < 1:
            tail = f", {spent:.0f} s, about {spent / fraction * (1 - fraction):.0f} s left"
        else:
            tail = f", {spent:.1f} s"
        print(f"{step}: {100 * fraction:3.0f} %{tail}", file=self._stream, flush=True)
