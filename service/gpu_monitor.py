"""Samples NVIDIA GPUs through NVML into the metrics, in a thread of its own.

Without a driver nothing is registered and one line is logged. A value that a device does not support is
asked for once and then left out; any other failed read counts as a sampler error and is tried again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pynvml

from service.metrics import GpuMetrics, Metrics

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


class GpuMonitor:
    """A sampler thread over all GPUs that NVML shows.

    Args:
        nvml: the `pynvml` module, or anything with the same functions (the boundary that tests replace).
        interval_seconds: pause between two samples.
    """

    def __init__(self, nvml: Any, metrics: GpuMetrics, interval_seconds: float) -> None:
        self._nvml = nvml
        self._metrics = metrics
        self._interval = interval_seconds
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._unsupported: set[tuple[int, str]] = set()
        self._totals: dict[tuple[int, str], float] = {}
        self._sampled_at: float | None = None
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
        self._nvml.nvmlShutdown()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.sample()

    def sample(self) -> None:
        """Read every value of every GPU once."""
        started = time.monotonic()
        elapsed = 0.0 if self._sampled_at is None else started - self._sampled_at
        self._sampled_at = started
        pids = _own_pids()
        for gpu, handle in enumerate(self._handles):
            self._sample_device(gpu, handle, pids, elapsed)
        self._metrics.sampler_duration.observe(time.monotonic() - started)

    def _sample_device(self, gpu: int, handle: Any, pids: set[int], elapsed_seconds: float) -> None:
        nvml, metrics, label = self._nvml, self._metrics, str(gpu)

        memory = self._read(gpu, "memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            metrics.memory_total.labels(label).set(memory.total)
            metrics.memory_used.labels(label).set(memory.used)
        processes = self._read(gpu, "processes", nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if processes is not None:
            # In a container the driver reports host process ids (or none), and usedGpuMemory may be None.
            own = [p.usedGpuMemory for p in processes if p.pid in pids and p.usedGpuMemory is not None]
            if own:
                metrics.memory_process.labels(label).set(sum(own))

        for name, gauge, function, clock in (
            ("sm clock", metrics.sm_clock, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            ("sm clock max", metrics.sm_clock_max, nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            ("memory clock", metrics.memory_clock, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            (
                "memory clock max",
                metrics.memory_clock_max,
                nvml.nvmlDeviceGetMaxClockInfo,
                nvml.NVML_CLOCK_MEM,
            ),
        ):
            megahertz = self._read(gpu, name, function, handle, clock)
            if megahertz is not None:
                gauge.labels(label).set(megahertz * _MEGAHERTZ)

        milliwatts = self._read(gpu, "power", nvml.nvmlDeviceGetPowerUsage, handle)
        if milliwatts is not None:
            metrics.power.labels(label).set(milliwatts * _MILLI)
        limit = self._read(gpu, "power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        if limit is not None:
            metrics.power_limit.labels(label).set(limit * _MILLI)
        millijoules = self._read(gpu, "energy", nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        if millijoules is not None:
            before = self._totals.setdefault((gpu, "energy"), millijoules)
            # A reloaded driver starts from zero; such a step back is skipped.
            metrics.energy.labels(label).inc(max(0, millijoules - before) * _MILLI)
            self._totals[gpu, "energy"] = millijoules
        celsius = self._read(
            gpu, "temperature", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        )
        if celsius is not None:
            metrics.temperature.labels(label).set(celsius)
        utilization = self._read(gpu, "utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
        if utilization is not None:
            metrics.utilization.labels(label).set(utilization.gpu / 100)

        reasons = self._read(gpu, "clock events", nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is not None:
            for name, bit in CLOCK_EVENT_REASONS.items():
                active = bool(reasons & bit)
                metrics.clock_event_active.labels(label, name).set(active)
                metrics.clock_event_seconds.labels(label, name).inc(elapsed_seconds if active else 0.0)

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
                before = self._totals.get((gpu, kind), 0)
                metrics.ecc_errors.labels(label, kind).inc(max(0, count - before))
                self._totals[gpu, kind] = count

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


def start_gpu_monitor(metrics: Metrics, interval_seconds: float, nvml: Any = None) -> GpuMonitor | None:
    """Start sampling, or log one line and return None where there is no NVIDIA driver or no GPU."""
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
        monitor = GpuMonitor(nvml, GpuMetrics(metrics.registry), interval_seconds)
    except nvml.NVMLError as error:
        logger.warning("no GPU metrics: %s", error)
        nvml.nvmlShutdown()
        return None
    monitor.start()
    return monitor


def _own_pids() -> set[int]:
    process = psutil.Process(os.getpid())
    try:
        return {process.pid, *(child.pid for child in process.children(recursive=True))}
    except psutil.NoSuchProcess:
        # A child ended while the list was read; the next sample sees the rest.
        return {process.pid}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
