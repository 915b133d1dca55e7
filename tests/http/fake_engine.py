"""An engine without a model: same interface as EngineClient, scripted tokens, steps that a test can hold."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from service.engine.client import Admission, Arrived
from service.engine.grammar_client import Grammar
from service.engine.protocol import (
    BUILD_FACTS,
    EngineInfo,
    EngineStats,
    LinearLayerInfo,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from service.errors import EngineUnavailable, InvalidRequest, QueueFull

EOS = 1


class FakeStream:
    """One sequence: its tokens, one to each step, until its script ends or max_tokens is reached."""

    def __init__(
        self, engine: FakeEngine, request_id: str, prompt: list[int], sampling: SamplingParams
    ) -> None:
        self.engine = engine
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.script = deque(engine.script(prompt, sampling))
        self.produced = 0
        self.closed = False
        self.finished = False
        self.began = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.closed or self.finished:
            raise StopAsyncIteration
        try:
            await self.engine.step(self)
        except asyncio.CancelledError:
            self.close()
            raise
        if self.closed:
            raise StopAsyncIteration
        if self.engine.failure is not None:
            self._finish()
            raise EngineUnavailable(self.engine.failure)
        return self._output()

    async def batch(self) -> list[Arrived]:
        """As RequestStream: everything there is, which here is one output."""
        try:
            return [Arrived(await anext(self), time.monotonic())]
        except StopAsyncIteration:
            return []

    def _output(self) -> RequestOutput:
        first, self.began = not self.began, True
        sampling = self.sampling
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._logprobs(token) for token in self.prompt[1:])]
        if self.engine.error is not None and self.produced >= self.engine.error_after:
            self._finish()
            return RequestOutput(request_id=self.request_id, finish_reason="error", error=self.engine.error)
        tokens: list[int] = []
        finish = None
        stop_token = None
        if sampling.max_tokens > 0:
            token = self.script.popleft() if self.script else EOS
            tokens = [token]
            self.produced += 1
            if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
                finish, stop_token = "stop", token
        if finish is None and self.produced >= sampling.max_tokens:
            finish = "length"
        if finish is not None:
            self._finish()
        return RequestOutput(
            request_id=self.request_id,
            token_ids=tokens,
            finish_reason=finish,
            stop_token_id=stop_token,
            logprobs=[self._logprobs(token) for token in tokens] if sampling.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            queue_seconds=0.001 if first else None,
            prefill_seconds=0.002 if first else None,
        )

    def _logprobs(self, token: int) -> TokenLogprobs:
        alternatives = [(token, -0.25), (2 if token != 2 else 3, float("-inf"))]
        return TokenLogprobs(token, -0.25, alternatives[: self.sampling.logprobs or 0])

    def _finish(self) -> None:
        if not self.finished:
            self.finished = True
            self.engine.released(self)

    def close(self) -> None:
        """Abort."""
        if not self.closed:
            self.closed = True
            if not self.finished:
                self.engine.aborted.append(self.request_id)
                self.engine.abort_seen.set()
                self._finish()


class FakeEngine:
    """Deterministic stand-in for EngineClient.

    Attributes:
        text: what every sequence says, then end of sequence; `tokens` overrides it with token ids.
        gate: when set to a semaphore, each step of each sequence takes one permit.
        error, error_after: sequences fail with this message after so many tokens.
        added: every sequence that was started.
        grammars: kinds and sources that were compiled; the index is the key.
        aborted: ids of sequences closed before their end.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        vocab_size: int,
        max_model_len: int = 256,
        kv_blocks: int | None = None,
    ) -> None:
        self.encode = encode
        self.text = "one two three four five"
        self.tokens: list[int] | None = None
        self.gate: asyncio.Semaphore | None = None
        self.error: str | None = None
        self.error_after = 0
        self.bug: Exception | None = None
        self.capacity = 64
        self.taken = 0
        self.added: list[FakeStream] = []
        self.grammars: list[tuple[str, str]] = []
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self.stepped = asyncio.Event()
        self.stopped = False
        self.died = asyncio.Event()
        self.failure: str | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.stats = EngineStats()
        self.last_heard = time.monotonic()
        self.info = EngineInfo(
            architecture="FakeForCausalLM",
            implementation="native",
            device="cpu",
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=[EOS],
            num_kv_blocks=kv_blocks or -(-max_model_len // 16),
            kv_block_size=16,
            max_num_sequences=8,
            dense_bytes=1000,
            stored_bytes=600,
            load_seconds=0.5,
            build=dict.fromkeys(BUILD_FACTS, "") | {"cpu_isa": "generic", "cuda_kernels": "no"},
            layers=[
                LinearLayerInfo(
                    name="layers.0.q",
                    N=8,
                    K=16,
                    dtype="bfloat16",
                    format="bitmap",
                    sparsity=0.5,
                    dense_bytes=256,
                    stored_bytes=144,
                ),
                LinearLayerInfo(
                    name="lm_head",
                    N=8,
                    K=16,
                    dtype="bfloat16",
                    format="dense",
                    sparsity=0.0,
                    dense_bytes=256,
                    stored_bytes=256,
                ),
            ],
        )

    def script(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The tokens one sequence will say."""
        return list(self.tokens) if self.tokens is not None else [*self.encode(self.text), EOS]

    async def step(self, stream: FakeStream) -> None:
        """Wait for this sequence's next step."""
        if self.bug is not None:
            raise self.bug
        if self.gate is not None and self.failure is None:
            permit = asyncio.ensure_future(self.gate.acquire())
            died = asyncio.ensure_future(self.died.wait())
            try:
                await asyncio.wait({permit, died}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                permit.cancel()
                died.cancel()
        else:
            await asyncio.sleep(0)
        self.last_heard = time.monotonic()
        self.stepped.set()

    def released(self, stream: FakeStream) -> None:
        """A sequence's slot is free again."""
        self._free_slots(1)

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self.failure is None and not self.stopped

    @property
    def heartbeat_age_seconds(self) -> float:
        """As EngineClient."""
        return time.monotonic() - self.last_heard

    def admit(self, sequences: int = 1) -> Admission:
        """As EngineClient."""
        if not self.alive:
            raise EngineUnavailable(self.failure or "stopped")
        if self.taken + sequences > self.capacity:
            raise QueueFull(f"the server is at its limit of {self.capacity} sequences")
        self.taken += sequences
        return Admission(self, sequences)  # type: ignore[arg-type]

    def _free_slots(self, slots: int) -> None:
        self.taken -= slots

    async def compile_grammar(self, kind: str, source: str) -> Grammar:
        """As EngineClient, with anything but "refuse me" accepted and nothing followed."""
        if source == "refuse me":
            raise InvalidRequest("this engine refuses that")
        self.grammars.append((kind, source))
        return Grammar(len(self.grammars) - 1, 0, lambda key: None)

    def generate(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, admission: Admission
    ) -> FakeStream:
        """As EngineClient."""
        admission.slots -= 1
        stream = FakeStream(self, request_id, list(prompt), sampling)
        self.added.append(stream)
        return stream

    def die(self, reason: str) -> None:
        """What EngineClient does when its process ends."""
        self.failure = reason
        self.died.set()

    async def stop(self, timeout_seconds: float = 5.0) -> None:
        """As EngineClient: open sequences get EngineUnavailable."""
        self.stopped = True
        self.failure = self.failure or "the server is stopping"
        if self.gate is not None:
            for _ in range(1000):
                self.gate.release()
