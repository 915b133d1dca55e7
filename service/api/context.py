"""What every route needs: the engine, the tokenizer, the settings, and the server's state."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from service import __version__
from service.engine.client import EngineClient
from service.errors import EngineUnavailable
from service.metrics import Metrics
from service.settings import Settings
from service.tokenization import Tokenizer

from .defaults import SamplingDefaults


@dataclass
class ServerContext:
    """One server's parts and its state; lives in one event loop.

    Attributes:
        created: Unix time at which the model became available.
        draining: the server is about to stop and takes no new completion requests.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    settings: Settings
    metrics: Metrics
    defaults: SamplingDefaults
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    _answering: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def model_name(self) -> str:
        """The name clients use for the model."""
        return self.settings.model_name

    @functools.cached_property
    def system_fingerprint(self) -> str:
        """Changes when equal requests with equal seeds may be answered otherwise than before.

        Begins with b, as clients of llama.cpp look for a build number there.
        """
        info = self.engine.info
        facts = (
            __version__,
            info.architecture,
            info.implementation,
            info.device,
            info.dtype,
            info.vocab_size,
            info.stored_bytes,
            sorted(info.build.items()),
        )
        return "b" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence, prompt and output: what the model allows and the KV cache can hold.

        A longer one would be given up by the engine in its middle.
        """
        info = self.engine.info
        return min(info.max_model_len, info.num_kv_blocks * info.kv_block_size)

    def require_ready(self) -> None:
        """Raises EngineUnavailable when no new completion request can be taken."""
        if (reason := self.not_ready_reason()) is not None:
            raise EngineUnavailable(reason)

    def not_ready_reason(self) -> str | None:
        """Why the server takes no requests, or None."""
        return "the server is stopping" if self.draining else self.not_live_reason()

    def not_live_reason(self) -> str | None:
        """Why the server can never answer again and should be restarted, or None."""
        if not self.engine.alive:
            return "the engine has failed" if self.engine.died.is_set() else "the engine is stopping"
        age = self.engine.heartbeat_age_seconds
        if age > self.settings.stall_seconds:
            return f"the engine has been silent for {age:.0f} s"
        return None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts one HTTP request for `wait_until_idle`."""
        self._answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if self._answering == 0:
                self._idle.set()

    @property
    def requests_open(self) -> int:
        """HTTP requests being answered."""
        return self._answering

    async def wait_until_idle(self) -> None:
        """Returns when no HTTP request is being answered."""
        await self._idle.wait()
