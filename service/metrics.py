"""Every metric of the server: name, help, labels, buckets. Nothing else in the project defines one.

Names end in their base unit (`_seconds`, `_bytes`, `_hertz`, `_watts`, `_joules`, `_celsius`) or, for
counters, in `_total`. The page is always Prometheus text 0.0.4: the OpenMetrics form that prometheus_client
would negotiate rewrites names with colons, which the aliases that routers expect contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from service import __version__
from service.engine.protocol import BUILD_FACTS, EngineInfo, EngineStats, FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# `_created` series double the page and are not part of text 0.0.4.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From half a millisecond (a decode step of a small model on a large GPU) to ten minutes (a long prompt
# on a CPU), about three to a decade: a quantile read between two neighbours is off by at most 2.5x.
LATENCY_BUCKETS_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75,
    1.0, 2.0, 3.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
STEP_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

ENDPOINTS = ("completions", "chat.completions")
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
REJECTION_REASONS = (
    "invalid",
    "too_large",
    "body_timeout",
    "unauthorized",
    "model_not_found",
    "queue_full",
    "unavailable",
)
STEP_PHASES = ("prefill", "decode", "mixed")
PHASES = (*STEP_PHASES, "idle")


@dataclass
class EngineGpuMemory:
    """What torch's allocator in the engine process last said, in bytes; zeros on a CPU."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0

    def observe(self, stats: EngineStats) -> None:
        """Keep the values of a message; those without them (most) change nothing."""
        if stats.gpu_reserved_bytes:
            self.allocated = stats.gpu_allocated_bytes
            self.reserved = stats.gpu_reserved_bytes
            self.peak = stats.gpu_peak_bytes


class Metrics:
    """The registry of one server and the instruments that feed it.

    Label values that are known beforehand are created at once, so that rates and alerts see a zero
    before the first event. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        # Requests
        self.requests = self._counter(
            "lacunar_requests_total",
            "Completion requests accepted, one for each HTTP request whatever its n and number of prompts.",
            "endpoint",
        )
        self.http_requests = self._counter(
            "lacunar_http_requests_total",
            "HTTP responses by route template, method and status; unknown paths share one route.",
            "route",
            "method",
            "status",
        )
        self.rejections = self._counter(
            "lacunar_rejections_total", "Requests that were not accepted, by reason.", "reason"
        )
        self.sequences_finished = self._counter(
            "lacunar_sequences_finished_total",
            "Sequences (choices) that ended, by reason; abort: the client went away or the server stopped.",
            "reason",
        )
        self.requests_open = self._gauge(
            "lacunar_requests_open", "Completion requests being answered at the moment."
        )
        self.request_prompt_tokens = self._counter(
            "lacunar_request_prompt_tokens_total", "Prompt tokens of accepted requests, cached ones included."
        )

        # Latency, seen from the HTTP side
        self.time_to_first_token = self._latency(
            "lacunar_time_to_first_token_seconds",
            "From the arrival of the request's headers to its first token, for each sequence.",
        )
        self.inter_token = self._latency(
            "lacunar_inter_token_seconds", "Between two successive token arrivals of a sequence."
        )
        self.request_duration = self._latency(
            "lacunar_request_duration_seconds",
            "From the arrival of the request's headers to the end of its answer (end to end).",
            "endpoint",
        )
        self.admission = self._latency(
            "lacunar_admission_seconds",
            "From the arrival of a request's headers to its start in the engine: body, checks, tokenising.",
        )
        self.token_write = self._latency(
            "lacunar_token_write_seconds",
            "From the engine's sending of a streamed token to its writing to the client's socket.",
        )

        # Latency, seen from the engine
        self.queue = self._latency(
            "lacunar_queue_seconds", "From a sequence's arrival in the engine to its first scheduled step."
        )
        self.prefill = self._latency(
            "lacunar_prefill_seconds",
            "From a sequence's first scheduled step to its first token, waits between its steps included.",
        )
        self.step = self._latency("lacunar_step_seconds", "Duration of an engine step, by phase.", "phase")
        self.step_tokens = Histogram(
            "lacunar_step_tokens",
            "Tokens computed in an engine step, by phase.",
            ["phase"],
            buckets=STEP_TOKENS_BUCKETS,
            registry=self.registry,
        )

        # Engine state
        self.running = self._gauge("lacunar_sequences_running", "Sequences that hold KV blocks.")
        self.waiting = self._gauge("lacunar_sequences_waiting", "Sequences queued in the engine.")
        self.kv_blocks_used = self._gauge("lacunar_kv_blocks_used", "KV blocks in use.")
        self.kv_blocks = self._gauge("lacunar_kv_blocks", "KV blocks that exist.")
        self.engine_up = self._gauge("lacunar_engine_up", "1 while the engine process lives, else 0.")
        self.engine_heartbeat_age = self._gauge(
            "lacunar_engine_heartbeat_age_seconds", "Time since the engine process was last heard of."
        )
        self.engine_resident = self._gauge(
            "lacunar_engine_resident_memory_bytes", "Resident memory of the engine process."
        )
        self.preemptions = self._counter(
            "lacunar_preemptions_total", "Sequences that lost their KV blocks and were computed again."
        )
        self.prompt_tokens = self._counter(
            "lacunar_prompt_tokens_total", "Prompt tokens the engine has processed."
        )
        self.generation_tokens = self._counter(
            "lacunar_generation_tokens_total", "Tokens the engine has generated."
        )
        self.prefix_cache_queries = self._counter(
            "lacunar_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "lacunar_prefix_cache_hits_total", "Prompt tokens found in the prefix cache."
        )

        # Model and kernels
        self.linear_calls = self._counter(
            "lacunar_linear_calls_total",
            "Linear layer calls by the backend that ran and the bucket of M, the number of tokens.",
            "backend",
            "m_bucket",
        )
        self.weight_dense = self._gauge(
            "lacunar_weight_dense_bytes",
            "Size the linear layers' weights would have if stored dense, by the format they are stored in.",
            "format",
        )
        self.weight_stored = self._gauge(
            "lacunar_weight_stored_bytes",
            "Size of the linear layers' weights as stored, by format.",
            "format",
        )
        self.weight_sparsity = self._gauge(
            "lacunar_weight_sparsity_ratio",
            "Share of zeros in the linear layers' weights, by format.",
            "format",
        )
        self.model_load = self._gauge("lacunar_model_load_seconds", "Time the engine took to load the model.")
        self.model_info = self._gauge(
            "lacunar_model_info",
            "The served model; the value is always 1.",
            "model_name",
            "architecture",
            "implementation",
            "device",
            "dtype",
        )
        self.build_info = self._gauge(
            "lacunar_build_info",
            "The running program and its kernels; the value is always 1.",
            "version",
            *BUILD_FACTS,
        )

        for endpoint in ENDPOINTS:
            self.requests.labels(endpoint)
            self.request_duration.labels(endpoint)
        for finish_reason in FINISH_REASONS:
            self.sequences_finished.labels(finish_reason)
        for rejection in REJECTION_REASONS:
            self.rejections.labels(rejection)
        for phase in STEP_PHASES:
            self.step.labels(phase)
            self.step_tokens.labels(phase)
        self._totals: dict[str, int] = {}
        self.on_steps: Callable[[list[tuple[str, float, int]]], None] | None = None
        """Told of the steps (phase, seconds, tokens) that each message of the engine reports, if set."""
        self.engine_gpu_memory = EngineGpuMemory()
        self._aliases: CollectorRegistry | None = None

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(name, help_text, labels, registry=self.registry)

    def _latency(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(name, help_text, labels, buckets=LATENCY_BUCKETS_SECONDS, registry=self.registry)

    def page(self) -> bytes:
        """The /metrics page, Prometheus text 0.0.4."""
        page = generate_latest(self.registry)
        return page if self._aliases is None else page + generate_latest(self._aliases)

    def add_vllm_names(self, info: EngineInfo, model_name: str) -> None:
        """Also publish what routers (Gateway API inference extension, llm-d) and dashboards read of vLLM."""
        self._aliases = CollectorRegistry()
        self._aliases.register(_VllmNames(self.registry, info, model_name))

    def set_engine_info(self, info: EngineInfo, model_name: str) -> None:
        """Publish what the engine said about itself and the model, under the name that clients use."""
        self.engine_up.set(1)
        self.model_load.set(info.load_seconds)
        self.kv_blocks.set(info.num_kv_blocks)
        self.model_info.labels(
            model_name, info.architecture, info.implementation, info.device, info.dtype
        ).set(1)
        self.build_info.labels(__version__, *(info.build[fact] for fact in BUILD_FACTS)).set(1)
        for name in sorted({layer.format for layer in info.layers}):
            layers = [layer for layer in info.layers if layer.format == name]
            elements = sum(layer.N * layer.K for layer in layers)
            zeros = sum(layer.sparsity * layer.N * layer.K for layer in layers)
            self.weight_dense.labels(name).set(sum(layer.dense_bytes for layer in layers))
            self.weight_stored.labels(name).set(sum(layer.stored_bytes for layer in layers))
            self.weight_sparsity.labels(name).set(zeros / elements if elements else 0.0)

    def observe_stats(self, stats: EngineStats) -> None:
        """Take over the engine's state. Its counters are cumulative; a fall is ignored."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_blocks_used.set(stats.kv_blocks_used)
        if stats.kv_blocks_total:
            self.kv_blocks.set(stats.kv_blocks_total)
        if stats.resident_bytes:
            self.engine_resident.set(stats.resident_bytes)
        self._advance("preemptions", self.preemptions, stats.preemptions_total)
        self._advance("prompt", self.prompt_tokens, stats.prompt_tokens_total)
        self._advance("generation", self.generation_tokens, stats.generation_tokens_total)
        self._advance("queries", self.prefix_cache_queries, stats.prefix_cache_queries_total)
        self._advance("hits", self.prefix_cache_hits, stats.prefix_cache_hits_total)
        self.engine_gpu_memory.observe(stats)
        if self.on_steps is not None:
            self.on_steps(stats.step_seconds)
        for phase, seconds, tokens in stats.step_seconds:
            self.step.labels(phase).observe(seconds)
            self.step_tokens.labels(phase).observe(tokens)
        for key, total in stats.linear_calls_total.items():
            backend, _, m_bucket = key.partition("|")
            self._advance("linear|" + key, self.linear_calls.labels(backend, m_bucket), total)

    def _advance(self, key: str, counter: Counter, total: int) -> None:
        step = total - self._totals.get(key, 0)
        if step > 0:
            counter.inc(step)
            self._totals[key] = total


_VLLM_NAMES = {
    "lacunar_sequences_running": "vllm:num_requests_running",
    "lacunar_sequences_waiting": "vllm:num_requests_waiting",
    "lacunar_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "lacunar_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "lacunar_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "lacunar_queue_seconds": "vllm:request_queue_time_seconds",
    "lacunar_prefill_seconds": "vllm:request_prefill_time_seconds",
    "lacunar_prompt_tokens": "vllm:prompt_tokens",
    "lacunar_generation_tokens": "vllm:generation_tokens",
    "lacunar_preemptions": "vllm:num_preemptions",
    "lacunar_prefix_cache_queries": "vllm:prefix_cache_queries",
    "lacunar_prefix_cache_hits": "vllm:prefix_cache_hits",
}


class _VllmNames(Collector):
    """The registry's values once more, under vLLM's names and with its label `model_name`."""

    def __init__(self, registry: CollectorRegistry, info: EngineInfo, model_name: str) -> None:
        self._registry = registry
        self._info = info
        self._model = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[MetricFamily]:
        """One family for each alias."""
        values: dict[str, float] = {}
        for family in self._registry.collect():
            if family.name in ("lacunar_kv_blocks", "lacunar_kv_blocks_used"):
                values[family.name] = family.samples[0].value
            alias = _VLLM_NAMES.get(family.name)
            if alias is None:
                continue
            renamed = MetricFamily(alias, family.documentation, family.type)
            for sample in family.samples:
                name = alias + sample.name.removeprefix(family.name)
                renamed.add_sample(name, {**sample.labels, **self._model}, sample.value)
            yield renamed
        use = MetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", "gauge")
        blocks = values["lacunar_kv_blocks"]
        share = values["lacunar_kv_blocks_used"] / blocks if blocks else 0.0
        use.add_sample("vllm:kv_cache_usage_perc", self._model, share)
        yield use
        config = MetricFamily("vllm:cache_config_info", "The KV cache; the value is always 1.", "gauge")
        facts = {"block_size": str(self._info.kv_block_size), "num_gpu_blocks": str(self._info.num_kv_blocks)}
        config.add_sample("vllm:cache_config_info", {**facts, "engine": "0"}, 1)
        yield config


class GpuMetrics:
    """Metrics of NVIDIA GPUs; registered only where a driver answers, so that elsewhere they are absent.

    A value that a GPU does not support is never set and has no series. `gpu` is the index of the device.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(name, help_text, ["gpu", *labels], registry=registry)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, ["gpu", *labels], registry=registry)

        self.info = gauge(
            "lacunar_gpu_info",
            "Device and driver; the value is always 1.",
            "gpu_uuid",
            "name",
            "driver_version",
        )

        # Clocks, power and what holds them down: ten times a second
        self.sm_clock = gauge("lacunar_gpu_sm_clock_hertz", "Current SM clock.")
        self.sm_clock_max = gauge("lacunar_gpu_sm_clock_max_hertz", "Highest SM clock the device allows.")
        self.memory_clock = gauge("lacunar_gpu_memory_clock_hertz", "Current memory clock.")
        self.memory_clock_max = gauge(
            "lacunar_gpu_memory_clock_max_hertz", "Highest memory clock the device allows."
        )
        self.power = gauge("lacunar_gpu_power_watts", "Power drawn by the device at the moment.")
        self.power_average = gauge(
            "lacunar_gpu_power_average_watts", "Power drawn by the device, as its driver averages it."
        )
        self.power_limit = gauge("lacunar_gpu_power_limit_watts", "Power limit that is enforced.")
        self.clock_event_active = gauge(
            "lacunar_gpu_clock_event_active",
            "1 while the reason holds the clocks below their maximum, else 0.",
            "reason",
        )
        self.clock_event_seconds = counter(
            "lacunar_gpu_clock_event_seconds_total",
            "Time for which the reason held the clocks down, to the resolution of the sampler.",
            "reason",
        )

        # Memory and energy: once a second
        self.memory_total = gauge("lacunar_gpu_memory_total_bytes", "Memory of the device.")
        self.memory_used = gauge("lacunar_gpu_memory_used_bytes", "Memory in use by all processes.")
        self.memory_process = gauge(
            "lacunar_gpu_process_memory_bytes",
            "Memory in use by this server's processes; where the driver hides them (containers), what the "
            "engine's allocator holds.",
        )
        self.torch_allocated = gauge(
            "lacunar_gpu_torch_allocated_bytes", "Memory of the engine's live tensors."
        )
        self.torch_reserved = gauge(
            "lacunar_gpu_torch_reserved_bytes", "Memory that the engine's allocator holds."
        )
        self.torch_peak = gauge(
            "lacunar_gpu_torch_allocated_peak_bytes", "Most memory that the engine's tensors have taken."
        )
        self.energy = counter(
            "lacunar_gpu_energy_joules_total", "Energy used by the device since this server started."
        )

        # By what the engine was doing; a second or two late, when the step's report is in
        self.phase_seconds = counter(
            "lacunar_gpu_phase_seconds_total", "Time that the engine spent in each phase.", "phase"
        )
        self.phase_energy = counter(
            "lacunar_gpu_phase_energy_joules_total",
            "Energy used by the device while the engine was in each phase.",
            "phase",
        )
        self.phase_full_clock_seconds = counter(
            "lacunar_gpu_phase_full_clock_seconds_total",
            "Time in each phase times SM clock over its maximum: divided by the phase's time it is the mean "
            "clock ratio.",
            "phase",
        )
        self.phase_clock_ratio = gauge(
            "lacunar_gpu_phase_sm_clock_ratio",
            "SM clock over its maximum when the engine was last in the phase.",
            "phase",
        )

        # The rest: each ten seconds
        self.temperature = gauge("lacunar_gpu_temperature_celsius", "Temperature of the GPU die.")
        self.utilization = gauge(
            "lacunar_gpu_utilization_ratio", "Share of the last sample period in which a kernel ran."
        )
        self.pcie_throughput = gauge(
            "lacunar_gpu_pcie_bytes_per_second", "Traffic over PCIe, by direction.", "direction"
        )
        self.pcie_replays = counter("lacunar_gpu_pcie_replays_total", "Packets sent again over PCIe.")
        self.pcie_generation = gauge("lacunar_gpu_pcie_link_generation", "Generation of the PCIe link now.")
        self.pcie_width = gauge("lacunar_gpu_pcie_link_lanes", "Lanes of the PCIe link now.")
        self.ecc_errors = counter(
            "lacunar_gpu_ecc_errors_total",
            "Memory errors since the driver was loaded, by whether they were corrected.",
            "kind",
        )
        self.activity = gauge(
            "lacunar_gpu_activity_ratio",
            "Share of the peak over the last ten seconds, by unit: sm, occupancy, tensor, dram.",
            "unit",
        )

        # The sampler itself
        self.sampler_errors = counter("lacunar_gpu_sampler_errors_total", "Failed reads of a GPU value.")
        self.sampler_last = Gauge(
            "lacunar_gpu_sampler_last_timestamp_seconds",
            "Unix time of the last sample; old when the sampler hangs.",
            registry=registry,
        )
        self.sampler_duration = Histogram(
            "lacunar_gpu_sampler_duration_seconds",
            "Time one sample of all GPUs took.",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self.sampler_cpu = Counter(
            "lacunar_gpu_sampler_cpu_seconds_total",
            "Processor time of the sampler's thread.",
            registry=registry,
        )
