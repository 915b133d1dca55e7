"""What the engine process is started with. No torch here: the API side builds it."""

from __future__ import annotations

import msgspec

from service.errors import SettingsError
from service.logs import LogFormat

DEFAULT_MODEL_FACTORY = "service.model.loader:load_model"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process needs to know; sent to it as JSON when it starts.

    Attributes:
        model: directory of the checkpoint.
        device: "cpu", "cuda" or "cuda:1".
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        weights: "auto" keeps pruned layers compressed where that is faster, "dense" expands them all.
        implementation: "auto", "native" or "transformers": whose forward pass runs.
        max_model_len: longest sequence (prompt and output) in tokens; None takes the model's own limit.
        max_num_sequences: sequences that run at once.
        max_step_tokens: tokens of one step; prompts are prefilled in chunks that fill it up. Sequences that
            decode wait for the step that a chunk is in.
        max_queue: sequences that may wait beside the running ones before QueueFull.
        kv_block_size: tokens in one block of the KV cache.
        kv_cache_bytes: size of the KV cache. None: on a CPU what `max_num_sequences` sequences of
            `max_model_len` need, at most a quarter of the memory available after loading; on a GPU what
            `gpu_memory_utilization` leaves after loading and a warm-up step.
        gpu_memory_utilization: share of the GPU's memory that model, KV cache and everything else on it may
            take together. What is left absorbs captured steps and the allocator's fragmentation.
        cuda_graphs: capture decode steps at start and replay them. Costs seconds and some memory at start,
            and makes each step as fast as its kernels. Without an effect on a CPU.
        enable_prefix_caching: reuse the blocks of a prompt's beginning that an earlier sequence computed.
        seed: of the engine's own generator, for requests without a seed; None takes it from the system.
        threads: CPU threads for one operation; None takes the physical cores this process may use.
        log_format: how the engine's log lines look.
        model_factory: "module:function" that loads the model. Called as service.model.loader.load_model
            is (same keywords), returns a service.model.interface.CausalModel. For models that
            Lacunar does not know: the module must be importable in the engine process.

    Raises:
        SettingsError: a value is out of range.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    weights: str = "auto"
    implementation: str = "auto"
    max_model_len: int | None = None
    max_num_sequences: int = 64
    # SmolLM2-135M at 50 %, a prompt of 1024 tokens on one core of an EPYC: with 512 the longest step takes
    # 1.42 s and the prompt 2.48 s, with 256 0.66 s and 2.23 s, with 128 0.40 s and 2.50 s.
    max_step_tokens: int = 256
    max_queue: int = 256
    kv_block_size: int = 16
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    enable_prefix_caching: bool = True
    seed: int | None = None
    threads: int | None = None
    log_format: LogFormat = "text"
    model_factory: str = DEFAULT_MODEL_FACTORY

    def __post_init__(self) -> None:
        minimums = {
            "max_model_len": 1,
            "max_num_sequences": 1,
            "max_step_tokens": 1,
            "max_queue": 0,
            "kv_block_size": 1,
            "kv_cache_bytes": 1,
            "threads": 1,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise SettingsError(f"{name} is {value}, but must be at least {minimum}", param=name)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise SettingsError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, but must be above 0 and at most 1",
                param="gpu_memory_utilization",
            )
        if self.max_step_tokens < self.max_num_sequences:
            raise SettingsError(
                f"max_step_tokens is {self.max_step_tokens}, but every one of the max_num_sequences="
                f"{self.max_num_sequences} running sequences decodes one token a step: raise max_step_tokens "
                "or lower max_num_sequences",
                param="max_step_tokens",
            )
        module, _, function = self.model_factory.partition(":")
        if not module or not function:
            raise SettingsError(
                f"model_factory is {self.model_factory!r}, but must look like {DEFAULT_MODEL_FACTORY!r}",
                param="model_factory",
            )


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """First line on the engine process's standard input, which stays open as a sign of the parent's life.

    Attributes:
        config: how to run.
        commands: ZeroMQ endpoint where the engine receives `ToEngine`.
        outputs: ZeroMQ endpoint where the engine sends `FromEngine`.
        parent_pid: the process without which the engine has nothing to do.
        log_level: least level that the engine logs, as logging counts.
    """

    config: EngineConfig
    commands: str
    outputs: str
    parent_pid: int
    log_level: int
