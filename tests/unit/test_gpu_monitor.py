"""The GPU sampler against a stand-in for NVML, with NVML's units and its ways to fail."""

from __future__ import annotations

import logging
import os
import threading
from types import SimpleNamespace

import pynvml
import pytest

from service.gpu_monitor import CLOCK_EVENT_REASONS, start_gpu_monitor
from service.metrics import Metrics


class FakeNvml:
    """One H200-like device. `failures` maps a function's name to the NVML error it raises."""

    NVMLError = pynvml.NVMLError

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
        }

    def __getattr__(self, name):
        real = getattr(pynvml, name)  # a name that NVML does not have must not pass here
        if name.startswith("NVML_"):
            return real

        def call(*arguments):
            self.calls.append(name)
            if name in self.failures:
                raise pynvml.NVMLError(self.failures[name])
            if name in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"):
                memory = arguments[1] == pynvml.NVML_CLOCK_MEM
                return {True: 3201, False: 1980}[memory] - (10 if name == "nvmlDeviceGetClockInfo" else 0)
            if name == "nvmlDeviceGetTotalEccErrors":
                self.sampled.set()  # the last value of a sample
            return self.values[name]

        return call


@pytest.fixture
def nvml():
    return FakeNvml()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def monitor(nvml, metrics):
    running = start_gpu_monitor(metrics, 3600, nvml)
    assert running is not None
    yield running
    running.stop()


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
    assert sample(metrics, "lacunar_gpu_info", uuid="GPU-abc", name="H200", driver_version="580.1") == 1


def test_energy_counts_from_the_servers_start(monitor, nvml, metrics):
    assert sample(metrics, "lacunar_gpu_energy_joules_total") == 0
    nvml.values["nvmlDeviceGetTotalEnergyConsumption"] = 1_250_000
    monitor.sample()
    assert sample(metrics, "lacunar_gpu_energy_joules_total") == 250


def test_a_reloaded_driver_does_not_make_energy_fall(monitor, nvml, metrics):
    for millijoules in (1_250_000, 100, 1_100):
        nvml.values["nvmlDeviceGetTotalEnergyConsumption"] = millijoules
        monitor.sample()
    assert sample(metrics, "lacunar_gpu_energy_joules_total") == 251


def test_clock_events_are_flags_and_seconds(monitor, nvml, metrics):
    assert sample(metrics, "lacunar_gpu_clock_event_active", reason="software_power_cap") == 1
    assert sample(metrics, "lacunar_gpu_clock_event_active", reason="software_thermal") == 1
    assert sample(metrics, "lacunar_gpu_clock_event_active", reason="idle") == 0
    monitor.sample()
    assert sample(metrics, "lacunar_gpu_clock_event_seconds_total", reason="software_power_cap") > 0
    assert sample(metrics, "lacunar_gpu_clock_event_seconds_total", reason="idle") == 0


def test_the_reasons_are_nvmls():
    known = {value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksEventReason")}

    assert set(CLOCK_EVENT_REASONS.values()) <= known


def test_what_a_device_lacks_has_no_series_and_is_asked_for_once(nvml, metrics):
    nvml.failures = {
        "nvmlDeviceGetTotalEccErrors": pynvml.NVML_ERROR_NOT_SUPPORTED,
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
    assert sample(metrics, "lacunar_gpu_sampler_errors_total") is None
    assert sample(metrics, "lacunar_gpu_power_limit_watts") == 700


def test_a_failed_read_is_counted_and_tried_again(monitor, nvml, metrics):
    nvml.failures = {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_GPU_IS_LOST}
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
