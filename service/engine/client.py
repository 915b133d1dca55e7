"""The API process's end of the engine: starts the engine process, admits sequences, hands out their tokens.

One event loop owns an EngineClient; nothing here is thread-safe. Every sequence that was sent to the engine
gets exactly one final RequestOutput from it, aborted ones too; the slot that it holds in the queue is given
back then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from service import errors
from service.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    LacunarError,
    QueueFull,
    StartupError,
)

from .config import EngineConfig, Launch
from .grammar_client import (
    COMPILE_SECONDS,
    MAX_COMPILED_BYTES,
    Grammar,
    GrammarClient,
)
from .grammar_compiler import CompilerOptions, GrammarKind
from .protocol import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineStats,
    FromEngine,
    LoadProgress,
    RequestOutput,
    SamplingParams,
    Shutdown,
    StepOutputs,
    ToEngine,
)

# How long the socket may stay silent after the process's end before everything it said counts as read. The
# last bytes are in this machine's memory by then, so this only has to outlast a busy machine.
_DRAIN_SECONDS = 0.25


class Admission:
    """Slots in the engine's queue, held until `EngineClient.generate` takes them or `release` returns them.

    Use it as a context manager: leaving it releases what no sequence took.
    """

    def __init__(self, client: EngineClient, slots: int) -> None:
        self._client = client
        self.slots = slots

    def release(self) -> None:
        """Give back the slots that are left; calling it again does nothing."""
        self._client._free_slots(self.slots)
        self.slots = 0

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Arrived(NamedTuple):
    """An output and when the engine sent it, on this machine's monotonic clock."""

    output: RequestOutput
    sent_seconds: float


class _OpenSequence:
    """What the client knows of a sequence between `generate` and its final output."""

    __slots__ = ("abandoned", "error", "finished", "outputs", "request_id", "waiter")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.outputs: deque[Arrived] = deque()
        self.error: LacunarError | None = None
        self.finished = False
        self.abandoned = False
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def deliver(self, output: RequestOutput, sent_seconds: float) -> None:
        self.finished = output.finish_reason is not None
        if not self.abandoned:
            self.outputs.append(Arrived(output, sent_seconds))
            self.wake()

    def fail(self, error: LacunarError) -> None:
        self.finished = True
        self.error = error
        self.wake()


class RequestStream:
    """Outputs of one sequence, for `async for`; ends after the output that carries a `finish_reason`.

    Closing it, dropping it, or cancelling a task that waits in it aborts the sequence. So
    `asyncio.wait_for(anext(stream), ...)` aborts on its timeout; to wait with a deadline and go on, keep
    `asyncio.ensure_future(anext(stream))` across several `asyncio.wait` calls.

    Raises:
        EngineUnavailable: on iteration, when the engine died or stopped before the sequence ended.
    """

    def __init__(self, client: EngineClient, sequence: _OpenSequence) -> None:
        self._client = client
        self._sequence = sequence
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        """The id that `generate` was called with."""
        return self._sequence.request_id

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not await self._wait():
            raise StopAsyncIteration
        return self._sequence.outputs.popleft().output

    async def batch(self) -> list[Arrived]:
        """Everything that has arrived and was not read, once there is something; empty after the end.

        A reader that falls behind catches up in one go, instead of paying for each output by itself.

        Raises:
            EngineUnavailable: as iteration.
        """
        await self._wait()
        outputs = list(self._sequence.outputs)
        self._sequence.outputs.clear()
        return outputs

    async def _wait(self) -> bool:
        """Returns whether an output is there; False after the end."""
        sequence = self._sequence
        while not sequence.outputs:
            if sequence.error is not None:
                raise sequence.error
            if sequence.finished or sequence.abandoned:
                return False
            sequence.waiter = self._loop.create_future()
            try:
                await sequence.waiter
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                sequence.waiter = None
        return True

    def close(self) -> None:
        """Abort the sequence unless it has ended; what was not read yet is dropped."""
        sequence = self._sequence
        sequence.outputs.clear()
        if not sequence.abandoned:
            sequence.abandoned = True
            sequence.wake()
            if not sequence.finished:
                self._client.abort([sequence.request_id])

    async def aclose(self) -> None:
        """`close`, in the form that `contextlib.aclosing` wants."""
        self.close()

    def __del__(self) -> None:
        # The collector may run in any thread, and sockets belong to one: so by way of the loop.
        if not (self._sequence.finished or self._sequence.abandoned) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.close)


class EngineClient:
    """A running engine process, seen from the event loop of the API process.

    Attributes:
        info: what the engine said about itself when it was ready.
        stats: the latest state it sent.
        on_stats: called with each EngineStats as it arrives, if set; must not raise.
        died: set when the engine process ended without having been asked to. `failure` says why.
        failure: None, or why no request is taken any more.
    """

    def __init__(self, config: EngineConfig) -> None:
        """For `start` only: a client is usable once its engine has answered."""
        self.config = config
        self.info: EngineInfo
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.died = asyncio.Event()
        self.failure: str | None = None
        self._capacity = config.max_num_sequences + config.max_queue
        self._slots_taken = 0
        self._open: dict[str, _OpenSequence] = {}
        self._last_message = time.monotonic()
        self._messages = 0
        self._stopping = False
        self._failed: EngineFailed | None = None
        self._ready = asyncio.Event()
        self._exited = asyncio.Event()
        self._on_progress: Callable[[LoadProgress], None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._tasks: list[asyncio.Task[None]] = []
        self._directory: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._grammars: GrammarClient | None = None
        self._process: subprocess.Popen[bytes]

    # Life

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> EngineClient:
        """Start the engine process and wait until it has loaded the model.

        Args:
            config: how to run it.
            on_progress: called with each LoadProgress meanwhile.

        Raises:
            StartupError: or the subclass that the engine met (CheckpointError, SettingsError, ...).
        """
        client = cls(config)
        client._on_progress = on_progress
        try:
            client._spawn()
            await client._wait_until_ready()
        except BaseException:
            await client._kill()
            raise
        return client

    def _spawn(self) -> None:
        # mkdtemp makes it readable by this account alone, so nobody else can send the engine commands.
        self._directory = Path(tempfile.mkdtemp(prefix="lacunar-"))
        # The high-water marks are off because admission bounds the traffic: what can pile up is the output of
        # max_num_sequences + max_queue sequences, and a blocked engine could not see its parent's commands.
        self._context = zmq.asyncio.Context()
        commands = f"ipc://{self._directory}/commands"
        outputs = f"ipc://{self._directory}/outputs"
        # The commands socket is a plain one: `generate` and `abort` are not coroutines.
        self._commands: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        for socket, endpoint in ((self._commands, commands), (self._outputs, outputs)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)

        environment = dict(os.environ)
        # The child finds modules exactly where this process does, wherever either was started.
        environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        if self.config.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.config.threads)
        # torch asks for huge pages for what is 2 MB or larger: fewer TLB misses while weights stream. One
        # token through dense SmolLM2-135M took 12.4 ms with it and 13.5 ms without, on two Zen 4 cores.
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        # A process of its own program, not multiprocessing's spawn: that would run the main module again.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "service.engine"],
            stdin=subprocess.PIPE,
            env=environment,
        )
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="engine-watch", daemon=True).start()
        self._tasks = [
            loop.create_task(self._receive(), name="engine-receive"),
            loop.create_task(self._handle_exit(), name="engine-exit"),
        ]
        launch = Launch(
            config=self.config,
            commands=commands,
            outputs=outputs,
            parent_pid=os.getpid(),
            log_level=logging.getLogger("lacunar").getEffectiveLevel(),
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, which `_handle_exit` reports
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            loop.call_soon_threadsafe(self._exited.set)

    async def _wait_until_ready(self) -> None:
        ready = asyncio.ensure_future(self._ready.wait())
        died = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            died.cancel()
        if self._ready.is_set() and not self.died.is_set():
            return
        if self._failed is None:
            raise StartupError(f"the engine did not start: {self.failure}")
        kind = getattr(errors, self._failed.kind, None)
        if isinstance(kind, type) and issubclass(kind, LacunarError):
            raise kind(self._failed.message)
        raise StartupError(f"the engine did not start: {self._failed.kind}: {self._failed.message}")

    async def stop(self, timeout_seconds: float = 5.0) -> None:
        """End the engine process: ask, wait up to `timeout_seconds`, kill.

        Open sequences get EngineUnavailable. Drain first: whoever wants open sequences to finish waits for
        them before.
        """
        if not self._stopping:
            self._stopping = True
            self.failure = self.failure or "the server is stopping"
            self._fail_open(EngineUnavailable("the server is stopping"))
            self._send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), timeout_seconds)
        await self._kill()

    async def _kill(self) -> None:
        """Leave nothing behind: no process, task, socket or directory."""
        self._stopping = True
        if self._grammars is not None:
            await self._grammars.stop()
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()  # does nothing to a process that has ended
            await self._exited.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._context is not None:
            self._commands.close(linger=0)
            self._context.destroy(linger=0)
            self._context = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    # State

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self.failure is None and self._ready.is_set()

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._process.pid

    @property
    def heartbeat_age_seconds(self) -> float:
        """Seconds since the engine last sent anything. It sends with each step, and each second when idle."""
        return time.monotonic() - self._last_message

    @property
    def open_sequences(self) -> int:
        """Sequences that were sent to the engine and have not had their final output."""
        return len(self._open)

    @property
    def slots_free(self) -> int:
        """How many sequences `admit` would take now."""
        return self._capacity - self._slots_taken

    # Requests

    def admit(self, sequences: int = 1) -> Admission:
        """Reserve room for `sequences` sequences in the queue, all or none.

        Raises:
            QueueFull: that many are not free now.
            InvalidRequest: that many can never be free.
            EngineUnavailable: the engine has died or is stopping.
        """
        self._require_alive()
        if sequences > self._capacity:
            raise InvalidRequest(
                f"the request asks for {sequences} sequences at once (prompts times n), but this server "
                f"holds at most {self._capacity}",
                param="n",
            )
        if sequences > self.slots_free:
            raise QueueFull(
                f"the server is at its limit of {self._capacity} sequences "
                f"({self.slots_free} free, {sequences} asked for). Retry after a pause."
            )
        self._slots_taken += sequences
        return Admission(self, sequences)

    async def compile_grammar(self, kind: GrammarKind, source: str) -> Grammar:
        """A grammar for `SamplingParams.grammar`; hold it until the sequences that name it have started.

        The first call starts a process, which takes some seconds.

        Raises:
            InvalidRequest: the grammar cannot be used; the message says why.
            QueueFull, EngineUnavailable: not now.
        """
        self._require_alive()
        if self._grammars is None:
            options = CompilerOptions(
                tokenizer=self.config.model,
                vocab_size=self.info.vocab_size,
                eos_token_ids=self.info.eos_token_ids,
                seconds=COMPILE_SECONDS,
                max_bytes=MAX_COMPILED_BYTES,
            )
            self._grammars = GrammarClient(options, self._send)
        return await self._grammars.compile(kind, source)

    def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        admission: Admission | None = None,
    ) -> RequestStream:
        """Start one sequence at once and return its outputs' iterator.

        Args:
            request_id: unique among open sequences.
            prompt_token_ids: the prompt.
            sampling: how to choose tokens.
            admission: takes one of its slots; None admits the one sequence here.

        Raises:
            InvalidRequest: the prompt is empty, a token id is outside the vocabulary, or the id is in use.
            ContextLengthExceeded: the prompt leaves no room for a token.
            QueueFull, EngineUnavailable: as `admit`.
        """
        self._require_alive()
        self._validate(request_id, prompt_token_ids, sampling)
        if admission is None:
            admission = self.admit()
        assert admission.slots > 0, "more sequences than were admitted"
        admission.slots -= 1
        sequence = _OpenSequence(request_id)
        self._open[request_id] = sequence
        self._send(
            AddRequest(request_id=request_id, prompt_token_ids=list(prompt_token_ids), sampling=sampling)
        )
        return RequestStream(self, sequence)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask the engine to drop these sequences; their iterators end with `finish_reason` "abort".

        Ids that are not open are ignored.
        """
        open_ids = [request_id for request_id in request_ids if request_id in self._open]
        if open_ids:
            self._send(AbortRequest(request_ids=open_ids))

    def _validate(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        info = self.info
        if request_id in self._open:
            raise InvalidRequest(f"request id {request_id!r} is in use by an open request")
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        room = info.max_model_len - len(prompt)
        if room < min(1, sampling.max_tokens):
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, but the model's context is {info.max_model_len} "
                "tokens, prompt and output together",
                param="prompt",
            )
        named = (
            ("prompt", prompt),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        )
        for param, ids in named:
            if ids and not 0 <= min(ids) <= max(ids) < info.vocab_size:
                wrong = next(token for token in ids if not 0 <= token < info.vocab_size)
                raise InvalidRequest(
                    f"{param} has token id {wrong}, but the vocabulary is 0..{info.vocab_size - 1}",
                    param=param,
                )

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineUnavailable("the engine is not running, so no request can be taken; retry later")

    def _free_slots(self, slots: int) -> None:
        self._slots_taken -= slots

    # Traffic

    def _send(self, message: ToEngine) -> None:
        # Again: the engine has closed its end, and `_handle_exit` is about to say so to everyone.
        with contextlib.suppress(zmq.Again, zmq.ContextTerminated):
            if self._context is not None:
                self._commands.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        try:
            while True:
                self._handle(self._decoder.decode(await self._outputs.recv()))
                self._messages += 1
                self._last_message = time.monotonic()
        except Exception as error:
            # A bug on this side, in a callback or in a message. An engine that nobody listens to must not
            # look alive, so it ends and the open sequences learn why.
            self._failed = EngineFailed(kind=type(error).__name__, message=str(error))
            self._process.kill()
            raise

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                for output in message.outputs:
                    self._deliver(output, message.sent_seconds)
                self.stats = message.stats
                if self.on_stats is not None:
                    self.on_stats(message.stats)
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case EngineInfo():
                self.info = message
                self._ready.set()
            case EngineFailed():
                self._failed = message

    def _deliver(self, output: RequestOutput, sent_seconds: float) -> None:
        sequence = self._open.get(output.request_id)
        if sequence is None:  # failed by stop() already
            return
        sequence.deliver(output, sent_seconds)
        if sequence.finished:
            del self._open[output.request_id]
            self._free_slots(1)

    async def _handle_exit(self) -> None:
        await self._exited.wait()
        seen = -1
        while seen != self._messages:
            seen = self._messages
            await asyncio.sleep(_DRAIN_SECONDS)
        if self._stopping:
            return
        self.failure = self._describe_exit()
        self.died.set()
        # What exactly happened is for the log (`failure`), not for whoever sent the request.
        self._fail_open(EngineUnavailable("the engine has died and the request was lost; retry later"))

    def _describe_exit(self) -> str:
        if self._failed is not None:
            return f"the engine failed: {self._failed.kind}: {self._failed.message}"
        code = self._process.returncode
        if code < 0:
            hint = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
            return f"the engine process was killed by {signal.Signals(-code).name}{hint}"
        return f"the engine process ended with exit status {code}"

    def _fail_open(self, error: LacunarError) -> None:
        for sequence in self._open.values():
            sequence.fail(error)
        self._free_slots(len(self._open))
        self._open.clear()
