"""The engine process's loop: receive, schedule, run, sample, send. Owns the model and its device."""

from __future__ import annotations

import importlib
import platform
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import psutil
import torch
import zmq

from service.errors import SettingsError
from service.model.interface import CausalModel
from service.model.linear import kernel_facts

from .config import EngineConfig
from .decode_graphs import LargestTokens
from .grammars import Grammars
from .protocol import (
    AbortRequest,
    AddGrammar,
    AddRequest,
    DropGrammar,
    EngineInfo,
    EngineStats,
    FinishReason,
    FromEngine,
    LinearLayerInfo,
    LoadProgress,
    RequestOutput,
    SetVocabulary,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenLogprobs,
)
from .resources import usable_threads
from .runner import ModelRunner, StepLogits
from .sampler import NON_FINITE, NonFiniteLogits, Sample, Sampler
from .scheduler import Scheduler, StepPlan
from .sequence import Sequence

# With nothing to do the engine blocks on its socket, and says each second that it is alive.
_HEARTBEAT_MILLISECONDS = 1000

# Statistics that cost a system call or a walk over the layers are refreshed this often, and when work ends.
_SLOW_STATS_SECONDS = 0.5

_PROGRESS_SECONDS = 0.05


class EngineBroken(Exception):
    """The model fails on any input, so restarting is all that helps."""


@dataclass(slots=True)
class _InFlight:
    """A step that the device may still be computing: all its sequences decode and take the largest logit."""

    plan: StepPlan
    tokens: LargestTokens
    started: float


class Worker:
    """Loads the model on construction, then serves until told to stop.

    Args:
        config: how to run.
        commands: a PULL socket with `ToEngine` messages.
        outputs: a PUSH socket for `FromEngine` messages.

    Raises:
        StartupError: from loading the model, or for settings that do not fit it.
    """

    def __init__(self, config: EngineConfig, commands: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
        self._commands = commands
        self._outputs = outputs
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._process = psutil.Process()
        self._stopping = False

        started = time.monotonic()
        torch.set_num_threads(config.threads or usable_threads())
        torch.set_grad_enabled(False)
        progress = _Progress(self._send)
        self.model = load_model(config, progress)
        progress("warm up", 0.0)
        self.runner = ModelRunner(self.model, config, lambda share: progress("warm up", share))
        spec = self.model.spec
        self.scheduler = Scheduler(
            num_blocks=self.runner.num_blocks,
            block_size=config.kv_block_size,
            max_num_sequences=config.max_num_sequences,
            max_step_tokens=config.max_step_tokens,
            max_model_len=spec.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.sampler = Sampler(spec.vocab_size, spec.device, config.seed)
        self.grammars = Grammars(spec.vocab_size)
        progress("warm up", 1.0)
        self._info = self._describe(config, time.monotonic() - started)

        self._in_flight: _InFlight | None = None
        self._ready_outputs: list[RequestOutput] = []
        self._steps: list[tuple[str, float, int]] = []
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._slow_stats_due = 0.0
        self._linear_calls: dict[str, int] = {}
        self._resident_bytes = 0
        self._gpu_bytes = (0, 0, 0)

    @torch.inference_mode()
    def run(self) -> None:
        """Announce the engine and work until a Shutdown arrives.

        Raises:
            EngineBroken: a step failed, and so did a trivial one after it.
        """
        self._send(self._info)
        while True:
            self._receive()
            if self._stopping:
                return
            if self._busy:
                self._step()
            self._report()

    @property
    def _busy(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def _receive(self) -> None:
        """Take every command that has arrived; with no work to do, wait up to a heartbeat for one."""
        if not self._busy and not self._commands.poll(_HEARTBEAT_MILLISECONDS):
            return
        while True:
            try:
                message = self._decoder.decode(self._commands.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequest():
                    for request_id in message.request_ids:
                        sequence = self.scheduler.abort(request_id)
                        if sequence is not None:
                            self._end(sequence, "abort")
                case SetVocabulary():
                    self.grammars.set_vocabulary(message.data)
                case AddGrammar():
                    self.grammars.add(message.key, message.data)
                case DropGrammar():
                    self.grammars.drop(message.key)
                case Shutdown():
                    self._stopping = True
                    return

    def _add(self, request: AddRequest) -> None:
        grammar = request.sampling.grammar
        self.scheduler.add(
            Sequence(
                request.request_id,
                request.prompt_token_ids,
                request.sampling,
                eos_token_ids=self.model.spec.eos_token_ids,
                arrival_seconds=time.monotonic(),
                constraint=None if grammar is None else self.grammars.constraint(grammar),
            )
        )

    def _step(self) -> None:
        if self._in_flight is not None:
            self._step_ahead(self._in_flight)
            return
        started = time.monotonic()
        plan = self.scheduler.schedule()
        for sequence, reason in plan.failed:
            self._end(sequence, "error", error=reason)
        if not plan.chunks:
            return
        for chunk in plan.chunks:
            if chunk.sequence.first_scheduled_seconds is None:
                chunk.sequence.first_scheduled_seconds = started
        try:
            if self._can_launch(plan):
                self._in_flight = _InFlight(plan, self.runner.launch(plan), started)
                return
            logits = self.runner.run(plan)
            self.scheduler.commit(plan)
            self._advance(plan, logits)
        except Exception as error:
            self._recover(plan, error)
        self._steps.append((plan.phase, time.monotonic() - started, plan.num_tokens))

    def _can_launch(self, plan: StepPlan) -> bool:
        """Whether the step after this one can be launched without knowing what this one chooses."""
        return (
            self.runner.can_launch
            and plan.phase == "decode"
            and all(chunk.decodes and self.sampler.takes_largest(chunk.sequence) for chunk in plan.chunks)
        )

    def _step_ahead(self, current: _InFlight) -> None:
        """Launch the step after the one in flight where possible, then take that one's tokens."""
        self._in_flight = None
        try:
            ahead = self.scheduler.look_ahead(current.plan)
            if ahead is not None:
                plan, sources = ahead
                self._in_flight = _InFlight(plan, self.runner.launch(plan, sources), 0.0)
            tokens = current.tokens.wait()
            # Sequences may have left since the launch: by a stop token of the step before, or a client.
            rows = [row for row, c in enumerate(current.plan.chunks) if self.scheduler.holds(c.sequence)]
            plan = replace(current.plan, chunks=[current.plan.chunks[row] for row in rows])
            self.scheduler.commit(plan)
            samples = {
                index: Sample(tokens[row], error=NON_FINITE if tokens[row] < 0 else None)
                for index, row in enumerate(rows)
            }
            self._deliver(plan, samples, {})
        except Exception as error:
            self._in_flight = None  # of the same sequences
            self._recover(current.plan, error)
        now = time.monotonic()
        self._steps.append(("decode", now - current.started, current.plan.num_tokens))
        if self._in_flight is not None:
            # It began when the one before it ended.
            self._in_flight.started = now

    def _advance(self, plan: StepPlan, step: StepLogits) -> None:
        """Turn a step's logits into tokens, log probabilities and ends of sequences."""
        broken: dict[int, str] = {}
        for index, first, count in step.prompt_rows:
            chunk = plan.chunks[index]
            sequence = chunk.sequence
            gathered, top = sequence.prompt_logprobs, sequence.sampling.prompt_logprobs
            assert gathered is not None
            assert top is not None
            targets = sequence.tokens[len(gathered) : len(gathered) + count].tolist()
            try:
                gathered += self.sampler.prompt_logprobs(step.logits[first : first + count], targets, top)
            except NonFiniteLogits as error:
                broken[index] = str(error)

        sampled = [index for index, row in enumerate(step.sample_rows) if row >= 0]
        sequences = [plan.chunks[index].sequence for index in sampled]
        rows = [step.sample_rows[index] for index in sampled]
        logits = step.logits if len(rows) == len(step.logits) else step.logits[rows]
        samples = dict(zip(sampled, self.sampler.sample(logits, sequences), strict=True)) if sampled else {}
        self._deliver(plan, samples, broken)

    def _deliver(self, plan: StepPlan, samples: dict[int, Sample], broken: dict[int, str]) -> None:
        """Append what was sampled for each chunk, and queue the outputs."""
        now = time.monotonic()
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            sample = samples.get(index)
            fault = broken.get(index) or (sample.error if sample is not None else None)
            if fault is not None:
                self.scheduler.fail(sequence)
                self._end(sequence, "error", error=fault)
                continue
            if not chunk.completes:
                continue
            first = sequence.num_output == 0
            if first:
                self._prompt_tokens += sequence.prompt_length
            if sample is None:  # max_tokens is 0: only the prompt's log probabilities were asked for
                self.scheduler.finish(sequence)
                self._end(sequence, "length", now=now)
                continue
            reason = self.scheduler.append(sequence, sample.token)
            self._generation_tokens += 1
            logprobs = None if sample.logprobs is None else [sample.logprobs]
            if reason is not None:
                self.scheduler.finish(sequence)
                self._end(sequence, reason, token=sample.token, logprobs=logprobs, now=now if first else None)
            elif first:
                self._ready_outputs.append(
                    self._output(sequence, token=sample.token, logprobs=logprobs, now=now)
                )
            else:
                self._ready_outputs.append(
                    RequestOutput(request_id=sequence.request_id, token_ids=[sample.token], logprobs=logprobs)
                )

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Fail the sequences of a step that raised, and find out whether the engine can go on.

        Their KV may be half written, so nobody may share it. Whether the input or the engine is at fault
        shows in a step that can only fail if the model or its device is broken.
        """
        traceback.print_exception(error)
        for chunk in plan.chunks:
            if self.scheduler.holds(chunk.sequence):
                self.scheduler.fail(chunk.sequence)
                self._end(chunk.sequence, "error", error="the step that computed this sequence failed")
        pool = self.scheduler.pool
        blocks = pool.allocate(1)
        try:
            self.runner.probe(blocks[0])
        except Exception as again:
            self._report()
            raise EngineBroken(
                f"a step failed ({type(error).__name__}: {error}), and then so did a trivial one "
                f"({type(again).__name__}: {again})"
            ) from error
        pool.release(blocks)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        now: float | None = None,
    ) -> None:
        """Queue the final output of a sequence that has left the scheduler."""
        self.sampler.forget(sequence.request_id)
        self._ready_outputs.append(
            self._output(sequence, token=token, logprobs=logprobs, reason=reason, error=error, now=now)
        )

    def _output(
        self,
        sequence: Sequence,
        *,
        token: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        reason: FinishReason | None = None,
        error: str | None = None,
        now: float | None = None,
    ) -> RequestOutput:
        """`now` marks the first output, which tells of the prompt as well."""
        output = RequestOutput(
            request_id=sequence.request_id,
            token_ids=[] if token is None else [token],
            finish_reason=reason,
            stop_token_id=token if reason == "stop" else None,
            logprobs=logprobs,
            error=error,
        )
        started = sequence.first_scheduled_seconds
        if now is None or started is None:
            return output
        return msgspec.structs.replace(
            output,
            prompt_logprobs=sequence.prompt_logprobs,
            cached_tokens=sequence.cached_tokens,
            queue_seconds=started - sequence.arrival_seconds,
            prefill_seconds=now - started,
        )

    def _report(self) -> None:
        """Send what is ready, and the state: also the heartbeat."""
        now = time.monotonic()
        scheduler = self.scheduler
        if now >= self._slow_stats_due or not scheduler.has_work:
            self._linear_calls = self.model.linear_calls()
            self._resident_bytes = self._process.memory_info().rss
            if self.model.spec.device.type == "cuda":
                self._gpu_bytes = (
                    torch.cuda.memory_allocated(),
                    torch.cuda.memory_reserved(),
                    torch.cuda.max_memory_allocated(),
                )
            self._slow_stats_due = now + _SLOW_STATS_SECONDS
        stats = EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_used=scheduler.pool.num_used,
            kv_blocks_total=scheduler.pool.num_blocks,
            preemptions_total=scheduler.preemptions,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            prefix_cache_queries_total=scheduler.prefix_queries,
            prefix_cache_hits_total=scheduler.prefix_hits,
            step_seconds=self._steps,
            linear_calls_total=self._linear_calls,
            resident_bytes=self._resident_bytes,
            gpu_allocated_bytes=self._gpu_bytes[0],
            gpu_reserved_bytes=self._gpu_bytes[1],
            gpu_peak_bytes=self._gpu_bytes[2],
        )
        self._send(StepOutputs(outputs=self._ready_outputs, stats=stats, sent_seconds=time.monotonic()))
        self._ready_outputs = []
        self._steps = []

    def _send(self, message: FromEngine) -> None:
        self._outputs.send(self._encoder.encode(message))

    def _describe(self, config: EngineConfig, load_seconds: float) -> EngineInfo:
        spec = self.model.spec
        layers = [LinearLayerInfo(**asdict(report)) for report in self.model.layer_reports()]
        return EngineInfo(
            architecture=spec.architecture,
            implementation=spec.implementation,
            device=str(spec.device),
            dtype=str(spec.dtype).removeprefix("torch."),
            vocab_size=spec.vocab_size,
            max_model_len=spec.max_model_len,
            eos_token_ids=list(spec.eos_token_ids),
            num_kv_blocks=self.runner.num_blocks,
            kv_block_size=config.kv_block_size,
            max_num_sequences=config.max_num_sequences,
            dense_bytes=sum(layer.dense_bytes for layer in layers),
            stored_bytes=sum(layer.stored_bytes for layer in layers),
            load_seconds=load_seconds,
            build={
                "python": platform.python_version(),
                "torch": str(torch.__version__),  # msgspec takes no subclass of str
                "threads": str(torch.get_num_threads()),
                **kernel_facts(spec.device.type),
            },
            layers=layers,
        )


def load_model(config: EngineConfig, progress: Callable[[str, float], None]) -> CausalModel:
    """Call the configured model factory.

    Raises:
        SettingsError: there is no such factory.
        StartupError: whatever the factory raises.
    """
    module_name, _, function_name = config.model_factory.partition(":")
    try:
        factory: Any = getattr(importlib.import_module(module_name), function_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise SettingsError(
            f"model_factory {config.model_factory!r} cannot be imported: {error}", param="model_factory"
        ) from error
    model: CausalModel = factory(
        config.model,
        device=config.device,
        dtype=config.dtype,
        weights=config.weights,
        max_model_len=config.max_model_len,
        implementation=config.implementation,
        progress=progress,
    )
    return model


class _Progress:
    """Sends LoadProgress, at most every `_PROGRESS_SECONDS` within a stage. Loaders may call it from any
    thread."""

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._stage = ""
        self._due = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        with self._lock:
            now = time.monotonic()
            if stage == self._stage and fraction < 1.0 and now < self._due:
                return
            self._stage = stage
            self._due = now + _PROGRESS_SECONDS
            self._send(LoadProgress(stage=stage, fraction=fraction))
