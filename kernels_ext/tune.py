"""Measures which backend is fastest on this machine: the dispatch tables of `lacunar tune`.

For a few shapes of decoder layers, sparsities and every bucket of M the package's kernel is timed against the
`dense` backend on the same weight, in turn. Weights are rotated over more bytes than the caches hold, so they
come from memory as they do in a model.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import BUCKET_ENDS, TABLE_VERSION, device_target, m_bucket, parse_table
from .lane_stream import (
    MAX_CALL_TOKENS,
    lane_stream_linear,
    lane_stream_pack,
    lane_stream_unpack,
    lane_stream_workspace,
)
from .ops import BitmapWeight, bitmap_linear, bitmap_pack, bitmap_unpack, cpu_isa, dense_linear

# Decoder layers from SmolLM2-135M to 7B: qkv, o, gate_up, down.
CPU_SHAPES: Final = ((576, 576), (3072, 576), (576, 1536), (4096, 4096))
# From SmolLM2-135M to 70B.
CUDA_SHAPES: Final = (
    (576, 576),
    (3072, 576),
    (2048, 2048),
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
)
SPARSITIES: Final = (0.3, 0.5, 0.7)
# Once the kernel takes this many times as long as torch, larger M are left to the rule of thumb, which says
# the same.
GIVE_UP: Final = 3.0

_CPU_COLD_BYTES: Final = 64 * 2**20
_CUDA_COLD_BYTES: Final = 256 * 2**20  # four times an H200's L2
_CUDA_LAUNCHES: Final = 16  # of a graph, so that the gap between two replays counts little
_CUDA_ROUNDS: Final = 5

# Calls with the number of the weight to use.
_Call = Callable[[int], object]


def tune(
    device: str,
    *,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    seconds: float = 45.0,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure a dispatch table of this machine's processor or of torch's current GPU.

    Args:
        device: "cpu" or "cuda".
        dtypes: of the weights. Kernels of a GPU take the 16-bit types alone, and one stands for the other.
        seconds: about how long it may take in all. On a CPU each weight has an equal share of it, and M that
            did not get their turn are left to the table that ships.
        progress: told the share of the work that is done (0..1).

    Returns:
        The table as `write_table` writes it.
    """
    on_cpu = device == "cpu"
    kinds = (
        [("dense", 0.0), *(("bitmap", s) for s in SPARSITIES)]
        if on_cpu
        else [("lane_stream", s) for s in SPARSITIES]
    )
    cases = [
        (format, N, K, dtype, sparsity)
        for dtype in dtypes
        for N, K in (CPU_SHAPES if on_cpu else CUDA_SHAPES)
        for format, sparsity in kinds
    ]
    generator = torch.Generator(device).manual_seed(0)
    started = time.monotonic()
    measurements: list[dict[str, Any]] = []
    for done, (format, N, K, dtype, sparsity) in enumerate(cases):
        deadline = started + seconds * (done + 1) / len(cases)
        weight = pruned_weight(N, K, dtype, sparsity, generator)
        if on_cpu:
            measurements += measure_cpu(format, weight, sparsity, deadline=deadline)
        elif time.monotonic() < deadline:
            measurements += _measure_lane_stream(weight, sparsity)
        progress((done + 1) / len(cases))
    machine = (
        {"threads": torch.get_num_threads(), "processor": processor_name()}
        if on_cpu
        else {
            "gpu": device_target("cuda"),
            "cuda": str(torch.version.cuda),
        }
    )
    return {
        "version": TABLE_VERSION,
        "made_by": "lacunar tune",
        "made_on": datetime.now(UTC).date().isoformat(),
        "machine": {**machine, "torch": str(torch.__version__)},
        "measurements": measurements,
    }


def write_table(path: Path, table: dict[str, Any]) -> None:
    """Write a table that dispatch can read, a measurement a line."""
    parse_table(table, name=path.stem, target=cpu_isa())
    lines = ",\n".join(f"    {json.dumps(m)}" for m in table["measurements"])
    head = json.dumps({**table, "measurements": []}, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: a server may start meanwhile.
    part = path.with_name(path.name + ".part")
    part.write_text(
        head.replace('"measurements": []', f'"measurements": [\n{lines}\n  ]') + "\n", encoding="utf-8"
    )
    part.replace(path)


def pruned_weight(N: int, K: int, dtype: torch.dtype, sparsity: float, generator: torch.Generator) -> Tensor:
    """A random ``[N, K]`` matrix with about that share of zeros."""
    device = generator.device
    weight = torch.randn(N, K, generator=generator, device=device).to(dtype)
    return weight.masked_fill_(torch.rand(N, K, generator=generator, device=device) < sparsity, 0.0)


def measure_cpu(
    format: str,
    weight: Tensor,
    sparsity: float,
    *,
    deadline: float | None = None,
    seconds: float = 0.15,
    cold_bytes: int = _CPU_COLD_BYTES,
    isa: str | None = None,
) -> list[dict[str, Any]]:
    """Measurements of one weight for M from small to large.

    Args:
        format: "bitmap" or "dense".
        weight: the dense ``[N, K]`` weight.
        sparsity: its share of zeros, as the table shall say.
        deadline: on the monotonic clock, after which no further M than 1 is begun.
        seconds: time for each pair of backends.
        cold_bytes: weights to rotate over.
        isa: the kernel's instruction set; None for the best.
    """
    N, K = weight.shape
    rotate = max(2, cold_bytes // (weight.numel() * weight.element_size()))
    kernel: Callable[[Tensor, int], object]
    reference: Callable[[Tensor, int], object]
    if format == "dense":
        matrices = [weight.clone() for _ in range(rotate)]
        kernel = lambda x, i: dense_linear(x, matrices[i], isa=isa)  # noqa: E731
        reference = lambda x, i: F.linear(x, matrices[i])  # noqa: E731
    else:
        first = bitmap_pack(weight)
        packed = [
            BitmapWeight(N, K, first.bitmap.clone(), first.values.clone(), first.row_offsets.clone())
            for _ in range(rotate)
        ]
        scratch = torch.empty_like(weight)
        kernel = lambda x, i: bitmap_linear(x, packed[i], isa=isa)  # noqa: E731
        reference = lambda x, i: F.linear(x, bitmap_unpack(packed[i], out=scratch, isa=isa))  # noqa: E731
    out = []
    for M in (*BUCKET_ENDS, 2 * BUCKET_ENDS[-1]):
        if M > 1 and deadline is not None and time.monotonic() >= deadline:
            break
        x = torch.randn(M, K).to(weight.dtype)
        ours, theirs = lowest_tenths([partial(kernel, x), partial(reference, x)], rotate, seconds)
        out.append(_measurement("isa", isa or cpu_isa(), format, weight, sparsity, m_bucket(M), ours, theirs))
        if ours > GIVE_UP * theirs:
            break
    return out


def lowest_tenths(functions: Sequence[_Call], rotate: int, seconds: float) -> list[float]:
    """Time functions in turn on the CPU, and keep each one's lowest tenth: other load only adds time.

    They are half a rotation apart, so that none finds in a cache what another has just read.
    """
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds * len(functions)
    turn = 0
    while turn < 5 or time.perf_counter() < end:
        for position, (function, kept) in enumerate(zip(functions, times, strict=True)):
            weight = (turn + position * rotate // len(functions)) % rotate
            start = time.perf_counter()
            function(weight)
            kept.append(time.perf_counter() - start)
        turn += 1
    return [sorted(kept)[len(kept) // 10] for kept in times]


def _measure_lane_stream(weight: Tensor, sparsity: float) -> list[dict[str, Any]]:
    first = lane_stream_pack(weight)
    rotate = max(2, -(-_CUDA_COLD_BYTES // first.stored_bytes))
    # A copy of the data is another weight to the caches; the descriptors are few bytes.
    copies = [first, *(replace(first, data=first.data.clone()) for _ in range(rotate - 1))]
    workspace, scratch = lane_stream_workspace(first), torch.empty_like(weight)

    def kernel(x: Tensor, i: int) -> Tensor:
        return lane_stream_linear(x, copies[i], workspace)

    def reference(x: Tensor, i: int) -> Tensor:
        return F.linear(x, lane_stream_unpack(copies[i], scratch))

    out = []
    for M in (m for m in BUCKET_ENDS if m <= MAX_CALL_TOKENS):
        x = torch.randn(M, first.K, device=weight.device).to(weight.dtype)
        ours, theirs = _graph_seconds([partial(kernel, x), partial(reference, x)], rotate)
        out.append(
            _measurement(
                "gpu", device_target("cuda"), "lane_stream", weight, sparsity, m_bucket(M), ours, theirs
            )
        )
        if ours > GIVE_UP * theirs:
            break
    return out


def _graph_seconds(functions: Sequence[_Call], rotate: int) -> list[float]:
    """Seconds of a call on the GPU: the median of interleaved rounds, each a CUDA graph of many calls."""
    launches = max(rotate, _CUDA_LAUNCHES)
    graphs = []
    for function in functions:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(0)  # libraries allocate what they need on their first call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in range(launches):
                function(launch % rotate)
        graph.replay()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(_CUDA_ROUNDS):
        for graph, kept in zip(graphs, times, strict=True):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            kept.append(begin.elapsed_time(end) / 1e3 / launches)
    return [statistics.median(kept) for kept in times]


def _measurement(
    kind: str,
    target: str,
    format: str,
    weight: Tensor,
    sparsity: float,
    bucket: str,
    kernel_seconds: float,
    dense_seconds: float,
) -> dict[str, Any]:
    return {
        kind: target,
        "format": format,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "N": weight.shape[0],
        "K": weight.shape[1],
        "sparsity": sparsity,
        "bucket": bucket,
        "kernel_seconds": float(f"{kernel_seconds:.3g}"),
        "dense_seconds": float(f"{dense_seconds:.3g}"),
    }


def processor_name() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
