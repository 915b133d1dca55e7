"""What this machine, or the container around this process, lets the engine use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def usable_threads(cgroup: Path = _CGROUP) -> int:
    """Physical cores that this process may use, at least 1.

    The smallest of: cores (hyperthreads share the units that matrix products keep busy), the processors in
    the affinity mask, and the container's CPU quota, which OpenMP does not know of.
    """
    limits = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    quota = _read_words(cgroup / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        limits.append(int(quota[0]) // int(quota[1]))
    return max(1, min(limits))


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that can be taken without swapping, by the system's account and the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit = _read_words(cgroup / "memory.max")
    used = _read_words(cgroup / "memory.current")
    if limit and used and limit[0] != "max":
        available = min(available, max(0, int(limit[0]) - int(used[0])))
    return available


def _read_words(path: Path) -> list[str]:
    """Words of a cgroup v2 file; none where the kernel offers no such file."""
    try:
        return path.read_text().split()
    except OSError:
        return []
