"""Which code multiplies a layer's weight: a choice by measured cost, with a reason that can be printed.

`choose` is pure: it looks a layer up in a table of measured times and compares. Two tables ship in tables/:
cpu_default.json, written by benchmarks/fit_dispatch.py, and cuda_default.json, measured on an H200.
`lacunar tune` measures this machine's processor or GPU and keeps the table in the cache directory, where
`default_table` finds it; what it lacks is looked up in the shipped one. Where no table has anything near a
layer, a rule of thumb decides, and the reason says so.

Backends on a CPU: for a bitmap-stored weight `bitmap_<isa>`, or `dense`, which decompresses the weight into a
scratch buffer and calls torch; for a dense-stored weight `dense_<isa>`, this package's small-M kernel, or
`dense`, torch's own. On a GPU: for a lane-stream weight `lane_stream`, or `dense`, which decompresses it and
calls cuBLAS; for any other weight `dense`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from .lane_stream import MAX_CALL_TOKENS
from .ops import DTYPES, ISAS, cpu_isa

TABLE_VERSION: Final = 1
DEFAULT_TABLE: Final = Path(__file__).parent / "tables" / "cpu_default.json"
DEFAULT_CUDA_TABLE: Final = Path(__file__).parent / "tables" / "cuda_default.json"
FORMATS: Final = ("bitmap", "dense", "lane_stream")
# That a table may hold: of a processor, of a GPU.
MEASURED_FORMATS: Final = ("bitmap", "dense")
MEASURED_CUDA_FORMATS: Final = ("lane_stream",)
# What `default_table` looks for where torch sees no GPU.
NO_GPU: Final = "no GPU"

# The last M of each bucket; the times of a bucket are measured at it. Above the last all are one bucket.
BUCKET_ENDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_OVER: Final = f"{BUCKET_ENDS[-1] + 1}+"

# Without a measurement: the largest M for which the kernel that reads each weight once is expected to win.
# Above it the product is bound by multiply-adds, which torch's blocked kernels do faster. `lane_stream` reads
# and decodes a weight once for up to 96 tokens; against it stands decompressing the weight first.
RULE_OF_THUMB_MAX_M: Final = {"bitmap": 8, "dense": 4, "lane_stream": 128}

# A bitmap-stored weight may take this much longer than a dense-stored one: at sparsity 0.5 it takes 0.56 of a
# 16-bit weight's memory, and one machine's table is off by as much on another.
BITMAP_MAX_SLOWDOWN: Final = 1.25

# How far a measured shape may be from a layer's: the factor in N times the factor in K, as a power of two.
_MAX_SHAPE_DISTANCE: Final = 4.0
_MAX_SPARSITY_DISTANCE: Final = 0.15


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and the sentence that says why."""

    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """How a weight had best be stored, one of MEASURED_FORMATS, and the sentence that says why."""

    format: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one product: this package's kernel against torch's.

    Attributes:
        target: the instruction set of the kernel, or the GPU's name; "isa" or "gpu" in a table's file.
        format: how the weight is stored, one of MEASURED_FORMATS or MEASURED_CUDA_FORMATS.
        dtype: "float32", "bfloat16" or "float16".
        N, K: shape of the weight.
        sparsity: share of zeros; 0 for a dense-stored weight.
        bucket: the bucket of M.
        kernel_seconds: time of bitmap_<isa>, dense_<isa> or lane_stream at the bucket's largest M.
        dense_seconds: time of the `dense` backend, decompressing included.
    """

    target: str
    format: str
    dtype: str
    N: int
    K: int
    sparsity: float
    bucket: str
    kernel_seconds: float
    dense_seconds: float


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times, and what this process multiplies with.

    Attributes:
        name: what reasons call it, such as the file's name.
        target: one of the names in `kernels_ext.ops.ISAS`, or a GPU's name; measurements of another are not
            used.
        measurements: by (target, format, dtype, bucket).
        fallback: where to look for what this table has nothing near of.
        source: where it came from, for people.
    """

    name: str
    target: str
    measurements: Mapping[tuple[str, str, str, str], tuple[Measurement, ...]]
    fallback: Table | None = None
    source: str = ""


def m_bucket(M: int) -> str:
    """The bucket of a token count: "1", "2", "3-4", "5-8" and so on by powers of two to "257+".

    M = 0 counts as 1.
    """
    first = 1
    for last in BUCKET_ENDS:
        if last >= M:
            return str(last) if first == last else f"{first}-{last}"
        first = last + 1
    return _OVER


def choose(
    table: Table,
    *,
    device: str,
    format: str,
    dtype: torch.dtype | str,
    N: int,
    K: int,
    sparsity: float,
    M: int,
) -> Choice:
    """Choose the backend for ``y[M, N] = x[M, K] @ W[N, K].T``. Depends on M through its bucket alone.

    Args:
        table: measured times.
        device: "cpu" or "cuda".
        format: how W is stored: one of FORMATS.
        dtype: of the weight.
        N, K: shape of the weight.
        sparsity: share of zeros, 0 to 1.
        M: tokens.

    Raises:
        ValueError: unknown device or format.
    """
    if format not in FORMATS:
        raise ValueError(f"dispatch: format must be one of {', '.join(FORMATS)}, got {format!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"dispatch: device must be cpu or cuda, got {device!r}")
    if device == "cuda" and format == "dense":
        return Choice("dense", "call cuBLAS: the weight is stored dense")
    if device == "cuda" and format == "bitmap":
        return Choice("dense", "decompress and call cuBLAS: no CUDA kernel multiplies by a bitmap")
    if device == "cpu" and format == "lane_stream":
        raise ValueError("dispatch: lane_stream weights are for CUDA devices, got device 'cpu'")
    if format == "lane_stream" and M > MAX_CALL_TOKENS:
        return Choice("dense", f"decompress and call cuBLAS: the kernel takes up to {MAX_CALL_TOKENS} tokens")

    dtype_name = str(dtype).removeprefix("torch.")
    bucket = m_bucket(M)
    kernel = format if format == "lane_stream" else f"{format}_{table.target}"
    near, holder = _nearest(table, format, dtype_name, bucket, N, K, 0.0 if format == "dense" else sparsity)
    if near is None:
        limit = RULE_OF_THUMB_MAX_M[format]
        wins = limit >= M
        what = "decompress and call cuBLAS" if format == "lane_stream" else "dense"
        return Choice(
            kernel if wins else "dense",
            f"rule of thumb, {kernel} up to M={limit}, {what} above: table {table.name} has nothing near "
            f"{N}x{K} {dtype_name} at sparsity {sparsity:.2f} and M={bucket} for {table.target}",
        )
    ours, theirs = near.kernel_seconds, near.dense_seconds
    at = f"{near.N}x{near.K} {near.dtype}"
    if format != "dense":
        at += f" at sparsity {near.sparsity:.2f}"
    figures = f"{kernel} {ours * 1e6:.0f} us, dense {theirs * 1e6:.0f} us for M={bucket}, {at}"
    return Choice(kernel if ours <= theirs else "dense", f"measured: {figures} (table {holder.name})")


def choose_format(
    table: Table, *, dtype: torch.dtype | str, N: int, K: int, sparsity: float, M: int
) -> FormatChoice:
    """Choose how a CPU stores a ``[N, K]`` weight by the fastest backend of each format at M.

    A bitmap is smaller, so it may take up to BITMAP_MAX_SLOWDOWN times as long. Where the table has one of
    the two formats only, what `choose` says of the bitmap decides: a weight that would be decompressed for
    the product is better kept dense.

    Args:
        table, dtype, N, K, sparsity, M: as for `choose`.
    """
    packed = choose(table, device="cpu", format="bitmap", dtype=dtype, N=N, K=K, sparsity=sparsity, M=M)
    if packed.backend == "dense":
        return FormatChoice("dense", packed.reason)
    dtype_name, bucket = str(dtype).removeprefix("torch."), m_bucket(M)
    bitmap, holder = _nearest(table, "bitmap", dtype_name, bucket, N, K, sparsity)
    dense, _ = _nearest(table, "dense", dtype_name, bucket, N, K, 0.0)
    if bitmap is None or dense is None:
        return FormatChoice("bitmap", packed.reason)
    stored = choose(table, device="cpu", format="dense", dtype=dtype, N=N, K=K, sparsity=0.0, M=M)
    # Each measurement is scaled to the layer's size, because the two may have different neighbours.
    ours = bitmap.kernel_seconds / (bitmap.N * bitmap.K) * N * K
    theirs = min(dense.kernel_seconds, dense.dense_seconds) / (dense.N * dense.K) * N * K
    is_slower = ours > BITMAP_MAX_SLOWDOWN * theirs
    return FormatChoice(
        "dense" if is_slower else "bitmap",
        f"measured: {packed.backend} {ours * 1e6:.0f} us at sparsity {bitmap.sparsity:.2f}, {stored.backend} "
        f"{theirs * 1e6:.0f} us for the weight stored dense, M={bucket}, {N}x{K} {dtype_name} "
        f"(table {holder.name})",
    )


def _nearest(
    table: Table, format: str, dtype: str, bucket: str, N: int, K: int, sparsity: float
) -> tuple[Measurement | None, Table]:
    """The nearest measurement that is near enough, and the table that holds it."""

    def distance(m: Measurement) -> tuple[float, float]:
        shape = abs(math.log2(max(N, 1) / m.N)) + abs(math.log2(max(K, 1) / m.K))
        return shape, abs(sparsity - m.sparsity)

    # A lane-stream kernel takes as long for one 16-bit type as for the other, and so does cuBLAS.
    dtypes = dict.fromkeys((dtype, "bfloat16", "float16")) if format == "lane_stream" else (dtype,)
    searched: Table | None = table
    while searched is not None:
        for name in dtypes:
            usable = [
                m
                for m in searched.measurements.get((searched.target, format, name, bucket), ())
                if distance(m)[0] <= _MAX_SHAPE_DISTANCE and distance(m)[1] <= _MAX_SPARSITY_DISTANCE
            ]
            if usable:
                return min(usable, key=distance), searched
        searched = searched.fallback
    return None, table


def device_target(device: str) -> str:
    """What tables call this machine's processor ("cpu") or torch's current GPU ("cuda")."""
    if device == "cpu":
        return cpu_isa()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU


def cached_table_path(target: str) -> Path:
    """Where `lacunar tune` keeps a target's table: $XDG_CACHE_HOME/lacunar/dispatch, by default below
    ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lacunar" / "dispatch" / (re.sub(r"[^a-z0-9]+", "-", target.lower()).strip("-") + ".json")


@functools.cache
def default_table(device: str = "cpu") -> Table:
    """This machine's own table where `lacunar tune` made one, before the one that ships.

    Raises:
        ValueError: the machine's own table is damaged; the message names the file.
    """
    target = device_target(device)
    shipped_path = DEFAULT_TABLE if device == "cpu" else DEFAULT_CUDA_TABLE
    shipped = replace(load_table(shipped_path, target), source=f"{shipped_path.stem} (shipped)")
    own = cached_table_path(target)
    if not own.exists():
        return shipped
    try:
        return replace(load_table(own, target), fallback=shipped, source=f"{own} (measured here)")
    except ValueError as error:
        raise ValueError(f"{error}. Delete {own}, or run lacunar tune again") from error


def load_table(path: Path, target: str | None = None) -> Table:
    """Read a table that `lacunar tune` or benchmarks/fit_dispatch.py wrote.

    Args:
        path: a JSON file.
        target: choose for this instruction set or GPU; None for this machine's instruction set.

    Raises:
        ValueError: the file is not a valid table; the message says where and why.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    return parse_table(content, name=path.stem, target=target or cpu_isa())


def parse_table(content: Any, *, name: str, target: str) -> Table:
    """Validate a table's decoded JSON.

    Raises:
        ValueError: a member is missing, unknown or out of range; the message names it.
    """
    if not isinstance(content, dict) or content.get("version") != TABLE_VERSION:
        got = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"table {name}: expected an object with version {TABLE_VERSION}, got {got!r}")
    entries = content.get("measurements")
    if not isinstance(entries, list):
        raise ValueError(f"table {name}: measurements must be a list, got {type(entries).__name__}")
    grouped: dict[tuple[str, str, str, str], list[Measurement]] = {}
    for index, entry in enumerate(entries):
        m = _parse_measurement(f"table {name}: measurements[{index}]", entry)
        grouped.setdefault((m.target, m.format, m.dtype, m.bucket), []).append(m)
    return Table(name, target, {key: tuple(group) for key, group in grouped.items()})


def _parse_measurement(where: str, entry: Any) -> Measurement:
    kind = "gpu" if isinstance(entry, dict) and "gpu" in entry else "isa"
    names = Measurement.__dataclass_fields__.keys() - {"target"} | {kind}
    if not isinstance(entry, dict) or entry.keys() != names:
        got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"{where}: expected the members {sorted(names)}, got {got}")
    if kind == "gpu" and (not isinstance(entry["gpu"], str) or not entry["gpu"]):
        raise ValueError(f"{where}: gpu must be a GPU's name, got {entry['gpu']!r}")
    buckets = {m_bucket(end) for end in BUCKET_ENDS} | {_OVER}
    for member, allowed in (
        *([("isa", ISAS.keys())] if kind == "isa" else []),
        ("format", MEASURED_FORMATS if kind == "isa" else MEASURED_CUDA_FORMATS),
        ("dtype", [str(d).removeprefix("torch.") for d in DTYPES]),
        ("bucket", buckets),
    ):
        if entry[member] not in allowed:
            raise ValueError(f"{where}: {member} must be one of {sorted(allowed)}, got {entry[member]!r}")
    for member in ("N", "K"):
        if type(entry[member]) is not int or entry[member] < 1:
            raise ValueError(f"{where}: {member} must be an integer of at least 1, got {entry[member]!r}")
    for member in ("kernel_seconds", "dense_seconds", "sparsity"):
        value = entry[member]
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {member} must be a finite number of at least 0, got {value!r}")
    if entry["sparsity"] > 1:
        raise ValueError(f"{where}: sparsity must be at most 1, got {entry['sparsity']!r}")
    return Measurement(target=entry[kind], **{name: entry[name] for name in names - {kind}})
