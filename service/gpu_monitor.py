"""Samples NVIDIA GPUs through NVML into the metrics, in a thread of its own.

Three speeds: clocks, power and clock-event reasons each `interval_seconds` (0.1 by default), memory and
energy each second, the rest each ten seconds.

Energy and clocks are attributed to what the engine was doing: its messages tell how long each step took and
ended when they arrive. Within one sample (a tenth of a second) energy is shared out by time; that is exact
for a sample in one phase, and evens the phases out where steps of several phases share a sample.

Without a driver nothing is registered and one line is logged. A value that a device does not support is
asked for once and then left out; any other failed read counts as a sampler error and is tried again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from service.metrics import PHASES, EngineGpuMemory, GpuMetrics, Metrics

logger = logging.getLogger("lacunar.gpu")

# NVML bit -> label value. The names follow nvml.h's nvmlClocksEventReason*; "idle" and "application_clocks"
# are no faults but explain a low clock.
CLOCK_EVENT_REASONS = {
    "idle": 0x1,
    "application_clocks": 0x2,
    "software_power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "sync_boost": 0x10,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "hardware_power_brake": 0x80,
    "display_clock": 0x100,
}

_MEGAHERTZ = 1_000_000
_MILLI = 1e-3
_KIBIBYTE = 1024

_MEDIUM_SECONDS = 1.0
_SLOW_SECONDS = 10.0

# A step is told when it has ended, so samples are attributed when no step that touches them is still open;
# a longer step than this is counted as idle in its first part.
_ATTRIBUTION_LAG_SECONDS = 2.0

# GPM metric id in nvml.h -> label value; all are percentages.
_ACTIVITIES = {
    "sm": "NVML_GPM_METRIC_SM_UTIL",
    "occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class PhaseTimeline:
    """Which phase the engine was in, from the durations that its messages report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[tuple[float, float, str]] = deque()

    def observe(self, steps: list[tuple[str, float, int]], now: float | None = None) -> None:
        """Take over (phase, seconds, tokens) of steps of which the last has just ended."""
        end = time.monotonic() if now is None else now
        spans = []
        for phase, seconds, _ in reversed(steps):
            spans.append((end - seconds, end, phase))
            end -= seconds
        with self._lock:
            # Two messages may arrive closer together than their steps ran.
            last = self._steps[-1][1] if self._steps else float("-inf")
            for start, stop, phase in reversed(spans):
                if stop > last:
                    self._steps.append((max(start, last), stop, phase))

    def between(self, start: float, stop: float) -> dict[str, float]:
        """Seconds in each phase, idle included; forgets what lies before `start`."""
        seconds = dict.fromkeys(PHASES, 0.0)
        with self._lock:
            while self._steps and self._steps[0][1] <= start:
                self._steps.popleft()
            for begin, end, phase in self._steps:
                if begin >= stop:
                    break
                seconds[phase] += max(0.0, min(end, stop) - max(begin, start))
        seconds["idle"] = max(0.0, stop - start - sum(seconds.values()))
        return seconds


@dataclass
class _Sample:
    start: float
    stop: float
    clock_ratio: float | None
    joules: float


class GpuMonitor:
    """A sampler thread over all GPUs that NVML shows.

    Args:
        nvml: the `pynvml` module, or anything with the same functions (the boundary that tests replace).
        interval_seconds: pause between two samples.
        timeline: what the engine was doing.
        engine_memory: what the engine's allocator holds.
        engine_gpu: index of the GPU that the engine runs on, None for a CPU.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        nvml: Any,
        metrics: GpuMetrics,
        interval_seconds: float,
        *,
        timeline: PhaseTimeline | None = None,
        engine_memory: EngineGpuMemory | None = None,
        engine_gpu: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = nvml
        self._metrics = metrics
        self._interval = interval_seconds
        self._timeline = timeline or PhaseTimeline()
        self._engine_memory = engine_memory or EngineGpuMemory()
        self._engine_gpu = engine_gpu
        self._clock = clock
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._unsupported: set[tuple[int, str]] = set()
        self._totals: dict[tuple[int, str], float] = {}
        self._sampled_at: float | None = None
        self._medium_due = self._slow_due = float("-inf")
        self._unscaled: list[_Sample] = []
        self._unattributed: deque[_Sample] = deque()
        self._gpm: dict[int, Any] = {}
        self._sm_clock_max: dict[int, float] = {}
        # An old driver lacks functions and a container may forbid some; asking again would not help.
        self._never = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_PERMISSION,
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        for gpu, handle in enumerate(self._handles):
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            name = _text(nvml.nvmlDeviceGetName(handle))
            metrics.info.labels(str(gpu), uuid, name, driver).set(1)
            metrics.sampler_errors.labels(str(gpu))
        if engine_gpu is not None:
            for phase in PHASES:
                for family in (metrics.phase_seconds, metrics.phase_energy, metrics.phase_full_clock_seconds):
                    family.labels(str(engine_gpu), phase)

    @property
    def device_count(self) -> int:
        """How many GPUs are sampled."""
        return len(self._handles)

    def start(self) -> None:
        """Take a first sample, then go on in the background."""
        self.sample()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and release NVML."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        for sample in self._gpm.values():
            self._nvml.nvmlGpmSampleFree(sample)
        self._nvml.nvmlShutdown()

    def _run(self) -> None:
        before = time.thread_time()
        while not self._stop.wait(self._interval):
            self.sample()
            now = time.thread_time()
            self._metrics.sampler_cpu.inc(now - before)
            before = now

    def sample(self) -> None:
        """Read of every GPU what is due."""
        started = self._clock()
        elapsed = 0.0 if self._sampled_at is None else started - self._sampled_at
        self._sampled_at = started
        medium, slow = started >= self._medium_due, started >= self._slow_due
        if medium:
            self._medium_due = started + _MEDIUM_SECONDS
        if slow:
            self._slow_due = started + _SLOW_SECONDS
        pids = _own_pids() if medium else set()
        for gpu, handle in enumerate(self._handles):
            if medium:
                self._sample_limits(gpu, handle)
            sample = self._sample_clocks(gpu, handle, started, elapsed)
            if gpu == self._engine_gpu and elapsed:
                self._unscaled.append(sample)
            if medium:
                self._sample_memory(gpu, handle, pids)
                joules = self._sample_energy(gpu, handle)
                if gpu == self._engine_gpu:
                    self._scale(joules)
            if slow:
                self._sample_rest(gpu, handle)
        self._attribute(started - _ATTRIBUTION_LAG_SECONDS)
        self._metrics.sampler_last.set(time.time())
        self._metrics.sampler_duration.observe(self._clock() - started)

    def _sample_clocks(self, gpu: int, handle: Any, now: float, elapsed_seconds: float) -> _Sample:
        nvml, metrics, label = self._nvml, self._metrics, str(gpu)
        clocks: dict[str, float] = {}
        for name, gauge, clock in (
            ("sm clock", metrics.sm_clock, nvml.NVML_CLOCK_SM),
            ("memory clock", metrics.memory_clock, nvml.NVML_CLOCK_MEM),
        ):
            megahertz = self._read(gpu, name, nvml.nvmlDeviceGetClockInfo, handle, clock)
            if megahertz is not None:
                clocks[name] = megahertz * _MEGAHERTZ
                gauge.labels(label).set(clocks[name])

        power = self._power(gpu, handle)
        reasons = self._read(gpu, "clock events", nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is not None:
            for name, bit in CLOCK_EVENT_REASONS.items():
                active = bool(reasons & bit)
                metrics.clock_event_active.labels(label, name).set(active)
                metrics.clock_event_seconds.labels(label, name).inc(elapsed_seconds if active else 0.0)

        most = self._sm_clock_max.get(gpu)
        ratio = clocks["sm clock"] / most if most and "sm clock" in clocks else None
        return _Sample(now - elapsed_seconds, now, ratio, power * elapsed_seconds)

    def _power(self, gpu: int, handle: Any) -> float:
        """Watts at the moment; from Hopper on nvmlDeviceGetPowerUsage is an average over a second."""
        nvml, label = self._nvml, str(gpu)
        fields = self._read(
            gpu,
            "power fields",
            nvml.nvmlDeviceGetFieldValues,
            handle,
            [nvml.NVML_FI_DEV_POWER_INSTANT, nvml.NVML_FI_DEV_POWER_AVERAGE],
        )
        instant = average = None
        if fields is not None:
            instant, average = (
                field.value.uiVal * _MILLI if field.nvmlReturn == nvml.NVML_SUCCESS else None
                for field in fields
            )
        if average is not None:
            self._metrics.power_average.labels(label).set(average)
        if instant is None:
            milliwatts = self._read(gpu, "power", nvml.nvmlDeviceGetPowerUsage, handle)
            instant = None if milliwatts is None else milliwatts * _MILLI
        if instant is None:
            return 0.0
        self._metrics.power.labels(label).set(instant)
        return float(instant)

    def _sample_limits(self, gpu: int, handle: Any) -> None:
        nvml, metrics, label = self._nvml, self._metrics, str(gpu)
        for name, gauge, clock in (
            ("sm clock max", metrics.sm_clock_max, nvml.NVML_CLOCK_SM),
            ("memory clock max", metrics.memory_clock_max, nvml.NVML_CLOCK_MEM),
        ):
            megahertz = self._read(gpu, name, nvml.nvmlDeviceGetMaxClockInfo, handle, clock)
            if megahertz is not None:
                gauge.labels(label).set(megahertz * _MEGAHERTZ)
                if name == "sm clock max":
                    self._sm_clock_max[gpu] = megahertz * _MEGAHERTZ
        limit = self._read(gpu, "power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        if limit is not None:
            metrics.power_limit.labels(label).set(limit * _MILLI)

    def _sample_memory(self, gpu: int, handle: Any, pids: set[int]) -> None:
        nvml, metrics, label = self._nvml, self._metrics, str(gpu)
        memory = self._read(gpu, "memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            metrics.memory_total.labels(label).set(memory.total)
            metrics.memory_used.labels(label).set(memory.used)
        processes = self._read(gpu, "processes", nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        # In a container the driver reports host process ids (or none), and usedGpuMemory may be None.
        own = [p.usedGpuMemory for p in processes if p.pid in pids and p.usedGpuMemory is not None]
        engine = self._engine_memory if gpu == self._engine_gpu and self._engine_memory.reserved else None
        if engine is not None:
            metrics.torch_allocated.labels(label).set(engine.allocated)
            metrics.torch_reserved.labels(label).set(engine.reserved)
            metrics.torch_peak.labels(label).set(engine.peak)
        if own:
            metrics.memory_process.labels(label).set(sum(own))
        elif engine is not None:
            metrics.memory_process.labels(label).set(engine.reserved)

    def _sample_energy(self, gpu: int, handle: Any) -> float | None:
        """Joules since the last reading, None where the counter has no new value."""
        millijoules = self._read(gpu, "energy", self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        if millijoules is None:
            return None
        before = self._totals.get((gpu, "energy"))
        self._totals[gpu, "energy"] = millijoules
        # A reloaded driver starts from zero; such a step back is skipped.
        joules = 0.0 if before is None else max(0, millijoules - before) * _MILLI
        self._metrics.energy.labels(str(gpu)).inc(joules)
        return joules if before is not None else None

    def _scale(self, joules: float | None) -> None:
        """Make the last second's samples add up to the energy counter, and pass them on.

        Power at ten instants misses what lies between them; the counter does not, but is too slow to tell
        the phases apart. Without a counter the samples stand as they are.
        """
        measured = sum(sample.joules for sample in self._unscaled)
        if joules is not None and measured > 0:
            for sample in self._unscaled:
                sample.joules *= joules / measured
        self._unattributed += self._unscaled
        self._unscaled = []

    def _attribute(self, until: float) -> None:
        """Share out the samples that ended before `until` among the phases."""
        metrics, label = self._metrics, str(self._engine_gpu)
        while self._unattributed and self._unattributed[0].stop <= until:
            sample = self._unattributed.popleft()
            length = sample.stop - sample.start
            for phase, seconds in self._timeline.between(sample.start, sample.stop).items():
                if seconds == 0.0:
                    continue
                metrics.phase_seconds.labels(label, phase).inc(seconds)
                metrics.phase_energy.labels(label, phase).inc(sample.joules * seconds / length)
                if sample.clock_ratio is not None:
                    metrics.phase_full_clock_seconds.labels(label, phase).inc(seconds * sample.clock_ratio)
                    # A sample that mostly belongs to another phase says nothing of this one's clock.
                    if seconds > length / 2:
                        metrics.phase_clock_ratio.labels(label, phase).set(sample.clock_ratio)

    def _sample_rest(self, gpu: int, handle: Any) -> None:
        nvml, metrics, label = self._nvml, self._metrics, str(gpu)
        celsius = self._read(
            gpu, "temperature", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        )
        if celsius is not None:
            metrics.temperature.labels(label).set(celsius)
        utilization = self._read(gpu, "utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
        if utilization is not None:
            metrics.utilization.labels(label).set(utilization.gpu / 100)
        for direction, way in (
            ("transmit", nvml.NVML_PCIE_UTIL_TX_BYTES),
            ("receive", nvml.NVML_PCIE_UTIL_RX_BYTES),
        ):
            kibibytes = self._read(gpu, f"pcie {direction}", nvml.nvmlDeviceGetPcieThroughput, handle, way)
            if kibibytes is not None:
                metrics.pcie_throughput.labels(label, direction).set(kibibytes * _KIBIBYTE)
        for name, gauge, function in (
            ("pcie generation", metrics.pcie_generation, nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            ("pcie width", metrics.pcie_width, nvml.nvmlDeviceGetCurrPcieLinkWidth),
        ):
            value = self._read(gpu, name, function, handle)
            if value is not None:
                gauge.labels(label).set(value)
        replays = self._read(gpu, "pcie replays", nvml.nvmlDeviceGetPcieReplayCounter, handle)
        if replays is not None:
            metrics.pcie_replays.labels(label).inc(self._increase(gpu, "pcie replays", replays))
        self._sample_activity(gpu, handle)
        for kind, error_type in (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            count = self._read(
                gpu,
                f"ecc {kind}",
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                error_type,
                nvml.NVML_VOLATILE_ECC,
            )
            if count is not None:
                metrics.ecc_errors.labels(label, kind).inc(self._increase(gpu, kind, count))

    def _increase(self, gpu: int, name: str, total: float) -> float:
        before = self._totals.get((gpu, name), 0)
        self._totals[gpu, name] = total
        return max(0, total - before)

    def _sample_activity(self, gpu: int, handle: Any) -> None:
        """GPM (from Hopper on): the mean activity between two samples that the driver takes."""
        nvml = self._nvml
        support = self._read(gpu, "activity", nvml.nvmlGpmQueryDeviceSupport, handle)
        if support is None:
            return
        if not support.isSupportedDevice:
            self._unsupported.add((gpu, "activity"))
            return
        sample = self._read(gpu, "activity sample", nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return
        if self._read(gpu, "activity sample", nvml.nvmlGpmSampleGet, handle, sample) is None:
            nvml.nvmlGpmSampleFree(sample)
            return
        before = self._gpm.get(gpu)
        self._gpm[gpu] = sample
        if before is None:
            return
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(_ACTIVITIES)
        query.sample1, query.sample2 = before, sample
        for position, constant in enumerate(_ACTIVITIES.values()):
            query.metrics[position].metricId = getattr(nvml, constant)
        answer = self._read(gpu, "activity metrics", nvml.nvmlGpmMetricsGet, query)
        nvml.nvmlGpmSampleFree(before)
        if answer is None:
            return
        for position, unit in enumerate(_ACTIVITIES):
            metric = query.metrics[position]
            # A unit that the driver cannot measure now reads as not-a-number.
            if metric.nvmlReturn == nvml.NVML_SUCCESS and metric.value == metric.value:
                self._metrics.activity.labels(str(gpu), unit).set(metric.value / 100)

    def _read(self, gpu: int, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The value, or None where the device has none or the read failed."""
        if (gpu, name) in self._unsupported:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._never:
                self._unsupported.add((gpu, name))
                logger.info("gpu %d does not report %s", gpu, name)
            else:
                self._metrics.sampler_errors.labels(str(gpu)).inc()
                logger.debug("gpu %d: reading %s failed: %s", gpu, name, error)
            return None


def start_gpu_monitor(
    metrics: Metrics, interval_seconds: float, nvml: Any = None, *, device: str = "cpu"
) -> GpuMonitor | None:
    """Start sampling, or log one line and return None where there is no NVIDIA driver or no GPU.

    Args:
        metrics: the server's, which tell of the engine's steps.
        interval_seconds: between two samples of clocks and power.
        nvml: stands in for the `pynvml` module.
        device: what the engine runs on; energy is attributed to phases for a `cuda` device.
    """
    nvml = nvml or pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.info("no GPU metrics: %s", error)
        return None
    try:
        if nvml.nvmlDeviceGetCount() == 0:
            logger.info("no GPU metrics: the driver shows no device")
            nvml.nvmlShutdown()
            return None
        timeline = PhaseTimeline()
        monitor = GpuMonitor(
            nvml,
            GpuMetrics(metrics.registry),
            interval_seconds,
            timeline=timeline,
            engine_memory=metrics.engine_gpu_memory,
            engine_gpu=_nvml_index(nvml, device),
        )
    except nvml.NVMLError as error:
        logger.warning("no GPU metrics: %s", error)
        nvml.nvmlShutdown()
        return None
    metrics.on_steps = timeline.observe
    monitor.start()
    return monitor


def _nvml_index(nvml: Any, device: str) -> int | None:
    """The index in NVML's order of a torch device, None for a CPU. CUDA_VISIBLE_DEVICES renumbers torch's."""
    if not device.startswith("cuda"):
        return None
    index = int(device.partition(":")[2] or 0)
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if index >= len(visible):
        return index
    if visible[index].isdecimal():
        return int(visible[index])
    for gpu in range(nvml.nvmlDeviceGetCount()):
        if _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(gpu))).startswith(visible[index]):
            return gpu
    return index


def _own_pids() -> set[int]:
    process = psutil.Process(os.getpid())
    try:
        return {process.pid, *(child.pid for child in process.children(recursive=True))}
    except psutil.NoSuchProcess:
        # A child ended while the list was read; the next sample sees the rest.
        return {process.pid}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
