"""The GPU sampler against a stand-in for NVML, with NVML's units and its ways to fail."""

from __future__ import annotations

import logging
import os
import threading
from types import SimpleNamespace
from typing import ClassVar

import pynvml
import pytest

from service.engine.protocol import EngineStats
from service.gpu_monitor import CLOCK_EVENT_REASONS, GpuMonitor, PhaseTimeline, start_gpu_monitor
from service.metrics import EngineGpuMemory, GpuMetrics, Metrics


def field(milliwatts):
    return SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=milliwatts))


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeNvml:
    """One H200-like device. `failures` maps a function's name to the NVML error it raises."""

    NVMLError: ClassVar = pynvml.NVMLError

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self.calls: list[str] = []
        self.sampled = threading.Event()
        self.values = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": b"GPU-abc",
            "nvmlDeviceGetName": "H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_000_000_000, used=10_000_000_000),
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=7),
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=None),
                SimpleNamespace(pid=1, usedGpuMemory=100),
            ],
            "nvmlDeviceGetPowerUsage": 350_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": 1_000_000,
            "nvmlDeviceGetTemperature": 45,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=80, memory=10),
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x20,
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetPcieThroughput": 3,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetPcieReplayCounter": 1,
            "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
            "nvmlGpmSampleAlloc": None,
            "nvmlGpmSampleFree": None,
        }
        self.sm_megahertz = 1970
        self.activities = (80.0, 40.0, 60.0, 20.0)

    def __getattr__(self, name):
        real = getattr(pynvml, name)  # a name that NVML does not have must not pass here
        if name.startswith(("NVML_", "c_nvml")):
            return real

        def call(*arguments):
            self.calls.append(name)
            if name == "nvmlDeviceGetCurrentClocksEventReasons":
                self.sampled.set()
            if name in self.failures:
                raise pynvml.NVMLError(self.failures[name])
            if name in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"):
                if arguments[1] == pynvml.NVML_CLOCK_MEM:
                    return 3201 if name == "nvmlDeviceGetMaxClockInfo" else 3191
                return 1980 if name == "nvmlDeviceGetMaxClockInfo" else self.sm_megahertz
            if name == "nvmlDeviceGetFieldValues":
                watts = self.values["nvmlDeviceGetPowerUsage"]
                return [field(watts), field(watts - 500)]
            if name == "nvmlGpmSampleAlloc":
                return pynvml.c_nvmlGpmSample_t()
            if name == "nvmlGpmSampleGet":
                return arguments[1]
            if name == "nvmlGpmMetricsGet":
                for position, value in enumerate(self.activities):
                    arguments[0].metrics[position].value = value
                return arguments[0]
            return self.values[name]

        return call


@pytest.fixture
def nvml():
    return FakeNvml()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline():
    return PhaseTimeline()


@pytest.fixture
def monitor(nvml, metrics, clock, timeline):
    sampler = GpuMonitor(
        nvml,
        GpuMetrics(metrics.registry),
        3600,
        timeline=timeline,
        engine_memory=metrics.engine_gpu_memory,
        engine_gpu=0,
        clock=clock,
    )
    sampler.sample()
    return sampler


def later(monitor, clock, seconds=10.0):
    """The next sample of all three speeds."""
    clock.now += seconds
    monitor.sample()


def sample(metrics, metric, **labels):
    return metrics.registry.get_sample_value(metric, {"gpu": "0", **labels})


def test_values_are_published_in_base_units(monitor, metrics):
    assert sample(metrics, "lacunar_gpu_memory_total_bytes") == 150e9
    assert sample(metrics, "lacunar_gpu_memory_used_bytes") == 10e9
    assert sample(metrics, "lacunar_gpu_process_memory_bytes") == 7
    assert sample(metrics, "lacunar_gpu_sm_clock_hertz") == 1.97e9
    assert sample(metrics, "lacunar_gpu_sm_clock_max_hertz") == 1.98e9
    assert sample(metrics, "lacunar_gpu_memory_clock_hertz") == 3.191e9
    assert sample(metrics, "lacunar_gpu_power_watts") == 350.5
    assert sample(metrics, "lacunar_gpu_power_limit_watts") == 700
    assert sample(metrics, "lacunar_gpu_temperature_celsius") == 45
    assert sample(metrics, "lacunar_gpu_utilization_ratio") == 0.8
    assert sample(metrics, "lacunar_gpu_ecc_errors_total", kind="corrected") == 2
    assert sample(metrics, "lacunar_gpu_info", gpu_uuid="GPU-abc", name="H200", driver_version="580.1") == 1


def test_energy_counts_from_the_servers_start(monitor, nvml, metrics, clock):
    assert sample(metrics, "lacunar_gpu_energy_joules_total") == 0
    nvml.values["nvmlDeviceGetTotalEnergyConsumption"] = 1_250_000
    later(monitor, clock)
    assert sample(metrics, "lacunar_gpu_energy_joules_total") == 250


def test_a_reloaded_driver_does_not_make_energy_fall(monitor, nvml, metrics, clock):
    for millijoules in (1_250_000, 100, 1_100):
        nvml.values["nvmlDeviceGetTotalEnergyConsumption"] = millijoules
        later(monitor, clock)
    assert sample(metrics, "lacunar_gpu_energy_joules_total") == 251


def test_clock_events_are_flags_and_seconds(monitor, nvml, metrics, clock):
    assert sample(metrics, "lacunar_gpu_clock_event_active", reason="software_power_cap") == 1
    assert sample(metrics, "lacunar_gpu_clock_event_active", reason="software_thermal") == 1
    assert sample(metrics, "lacunar_gpu_clock_event_active", reason="idle") == 0
    later(monitor, clock, 2.0)
    assert sample(metrics, "lacunar_gpu_clock_event_seconds_total", reason="software_power_cap") == 2
    assert sample(metrics, "lacunar_gpu_clock_event_seconds_total", reason="idle") == 0


def test_three_speeds(monitor, nvml, clock):
    """Ten seconds at ten samples a second."""
    nvml.calls.clear()
    for _ in range(100):
        clock.now += 0.1
        monitor.sample()

    assert nvml.calls.count("nvmlDeviceGetFieldValues") == 100
    assert nvml.calls.count("nvmlDeviceGetCurrentClocksEventReasons") == 100
    assert 9 <= nvml.calls.count("nvmlDeviceGetTotalEnergyConsumption") <= 10
    assert 9 <= nvml.calls.count("nvmlDeviceGetMemoryInfo") <= 10
    assert nvml.calls.count("nvmlDeviceGetTemperature") <= 1


def test_activity_needs_two_samples(monitor, metrics, clock):
    assert sample(metrics, "lacunar_gpu_activity_ratio", unit="sm") is None
    later(monitor, clock)
    assert sample(metrics, "lacunar_gpu_activity_ratio", unit="sm") == 0.8
    assert sample(metrics, "lacunar_gpu_activity_ratio", unit="tensor") == 0.6
    assert sample(metrics, "lacunar_gpu_activity_ratio", unit="dram") == 0.2


def test_energy_and_clocks_are_attributed_to_phases(monitor, nvml, metrics, clock, timeline):
    """Two seconds of prefill at 660 W and half the clock, then two of decode at 330 W and the full one."""
    millijoules = 1_000_000
    for phase, watts, megahertz in (("prefill", 660, 990), ("decode", 330, 1980), (None, 110, 1980)):
        nvml.values["nvmlDeviceGetPowerUsage"] = watts * 1000
        nvml.sm_megahertz = megahertz
        for _ in range(16 if phase else 40):
            clock.now += 0.125
            millijoules += watts * 125
            nvml.values["nvmlDeviceGetTotalEnergyConsumption"] = millijoules
            if phase:
                timeline.observe([(phase, 0.0625, 8), (phase, 0.0625, 8)], now=clock.now)
            monitor.sample()

    for phase, joules, ratio in (("prefill", 1320, 0.5), ("decode", 660, 1.0)):
        assert sample(metrics, "lacunar_gpu_phase_seconds_total", phase=phase) == pytest.approx(2)
        assert sample(metrics, "lacunar_gpu_phase_energy_joules_total", phase=phase) == pytest.approx(joules)
        assert sample(metrics, "lacunar_gpu_phase_full_clock_seconds_total", phase=phase) == pytest.approx(
            2 * ratio
        )
        assert sample(metrics, "lacunar_gpu_phase_sm_clock_ratio", phase=phase) == ratio
    assert sample(metrics, "lacunar_gpu_phase_energy_joules_total", phase="mixed") == 0
    assert sample(metrics, "lacunar_gpu_phase_energy_joules_total", phase="idle") > 200


def test_attributed_energy_is_the_counters(monitor, nvml, metrics, clock):
    """The power readings say 350 W, the counter 700 W: the counter counts."""
    millijoules = 1_000_000
    for _ in range(64):
        clock.now += 0.125
        millijoules += 700 * 125
        nvml.values["nvmlDeviceGetTotalEnergyConsumption"] = millijoules
        monitor.sample()

    seconds = sample(metrics, "lacunar_gpu_phase_seconds_total", phase="idle")
    joules = sample(metrics, "lacunar_gpu_phase_energy_joules_total", phase="idle")
    assert joules / seconds == pytest.approx(700)


def test_a_sample_is_shared_out_by_time():
    timeline = PhaseTimeline()
    timeline.observe([("prefill", 0.25, 1), ("decode", 0.125, 1)], now=10.0)

    shares = timeline.between(9.5, 10.0)

    assert shares == {"prefill": 0.25, "decode": 0.125, "mixed": 0.0, "idle": 0.125}


def test_in_a_container_the_engines_memory_stands_in(nvml, metrics):
    """The driver shows the host's process ids there."""
    nvml.values["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=1, usedGpuMemory=100)]
    metrics.observe_stats(EngineStats(gpu_allocated_bytes=5, gpu_reserved_bytes=8, gpu_peak_bytes=6))
    monitor = GpuMonitor(
        nvml, GpuMetrics(metrics.registry), 1, engine_memory=metrics.engine_gpu_memory, engine_gpu=0
    )
    monitor.sample()

    assert metrics.engine_gpu_memory == EngineGpuMemory(allocated=5, reserved=8, peak=6)
    assert sample(metrics, "lacunar_gpu_process_memory_bytes") == 8
    assert sample(metrics, "lacunar_gpu_torch_allocated_bytes") == 5
    assert sample(metrics, "lacunar_gpu_torch_reserved_bytes") == 8
    assert sample(metrics, "lacunar_gpu_torch_allocated_peak_bytes") == 6


def test_the_reasons_are_nvmls():
    known = {value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksEventReason")}

    assert set(CLOCK_EVENT_REASONS.values()) <= known


def test_what_a_device_lacks_has_no_series_and_is_asked_for_once(nvml, metrics):
    nvml.failures = {
        "nvmlDeviceGetTotalEccErrors": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetFieldValues": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        "nvmlDeviceGetTemperature": pynvml.NVML_ERROR_NO_PERMISSION,
    }
    monitor = start_gpu_monitor(metrics, 3600, nvml)
    monitor.sample()
    monitor.stop()

    assert nvml.calls.count("nvmlDeviceGetPowerUsage") == 1
    assert nvml.calls.count("nvmlDeviceGetTotalEccErrors") == 2  # corrected and uncorrected
    assert sample(metrics, "lacunar_gpu_power_watts") is None
    assert sample(metrics, "lacunar_gpu_ecc_errors_total", kind="corrected") is None
    assert sample(metrics, "lacunar_gpu_sampler_errors_total") == 0
    assert sample(metrics, "lacunar_gpu_power_limit_watts") == 700


def test_a_failed_read_is_counted_and_tried_again(monitor, nvml, metrics):
    nvml.failures = {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_GPU_IS_LOST}
    monitor.sample()
    nvml.failures = {}
    nvml.values["nvmlDeviceGetPowerUsage"] = 1000
    monitor.sample()

    assert sample(metrics, "lacunar_gpu_sampler_errors_total") == 1
    assert sample(metrics, "lacunar_gpu_power_watts") == 1


def test_the_thread_samples_until_it_is_stopped(nvml, metrics):
    monitor = start_gpu_monitor(metrics, 0.001, nvml)
    for _ in range(3):
        nvml.sampled.clear()
        assert nvml.sampled.wait(20)
    monitor.stop()

    assert nvml.calls[-1] == "nvmlShutdown"
    assert not any(thread.name == "gpu-monitor" for thread in threading.enumerate())


@pytest.mark.parametrize(
    "error",
    [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_UNKNOWN],
)
def test_without_a_driver_there_are_no_metrics_and_one_line(nvml, metrics, caplog, error):
    nvml.failures = {"nvmlInit": error}
    with caplog.at_level(logging.INFO, logger="lacunar.gpu"):
        assert start_gpu_monitor(metrics, 1, nvml) is None

    assert len(caplog.records) == 1
    assert "no GPU metrics" in caplog.text
    assert b"lacunar_gpu" not in metrics.page()


def test_a_driver_without_devices_is_no_error(nvml, metrics):
    nvml.values["nvmlDeviceGetCount"] = 0

    assert start_gpu_monitor(metrics, 1, nvml) is None
    assert nvml.calls[-1] == "nvmlShutdown"


def test_a_device_that_fails_at_once_is_no_crash(nvml, metrics):
    nvml.failures = {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}

    assert start_gpu_monitor(metrics, 1, nvml) is None
