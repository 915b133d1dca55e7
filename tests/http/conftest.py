"""A whole server on a free port: real sockets, real uvicorn, the real tokenizer code, a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from service.api.context import ServerContext
from service.api.defaults import load_defaults
from service.api.server import bind, serve_context
from service.metrics import Metrics
from service.settings import Settings
from service.tokenization import Tokenizer

from .fake_engine import FakeEngine
from .tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer and a chat template, and no model."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer of `checkpoint`."""
    return Tokenizer.load(checkpoint)


@dataclass
class Served:
    """A running server and what a test may want of it."""

    url: str
    admin_url: str
    context: ServerContext
    engine: FakeEngine
    stop: asyncio.Event
    hurry: asyncio.Event
    task: asyncio.Task[int]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    async def metric(self, name: str, **labels: str) -> float:
        """A sample's value from /metrics; 0 where it has no series."""
        value = self.context.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


@pytest.fixture
def serve(checkpoint: Path, tokenizer: Tokenizer) -> Callable[..., Any]:
    """`async with serve(setting=value, ...) as server:` with a scripted engine."""

    @asynccontextmanager
    async def run(**overrides: Any) -> AsyncIterator[Served]:
        max_model_len = overrides.pop("context_tokens", 256)
        kv_blocks = overrides.pop("kv_blocks", None)
        settings = Settings(model=checkpoint, port=0, **overrides)
        engine = FakeEngine(
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.vocab_size,
            max_model_len,
            kv_blocks,
        )
        context = ServerContext(
            engine=engine,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            settings=settings,
            metrics=Metrics(),
            defaults=load_defaults(checkpoint),
        )
        stop, hurry = asyncio.Event(), asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        listener, admin_url = bind("127.0.0.1", 0), ""
        listeners = [listener]
        if settings.admin_port is not None:
            listeners.append(bind("127.0.0.1", 0))
            admin_url = f"http://127.0.0.1:{listeners[1].getsockname()[1]}"
        task = asyncio.create_task(
            serve_context(context, *listeners, stop=stop, hurry=hurry, on_ready=ready.set_result)
        )
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        server = Served(ready.result(), admin_url, context, engine, stop, hurry, task)
        try:
            yield server
        finally:
            stop.set()
            hurry.set()
            await task

    return run


@pytest.fixture
async def server(serve: Callable[..., Any]) -> AsyncIterator[Served]:
    """A server with default settings."""
    async with serve() as running:
        yield running


@pytest.fixture
async def client(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to `server`."""
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
        yield http


@pytest.fixture
async def openai(server: Served) -> AsyncIterator[AsyncOpenAI]:
    """The official client, unchanged, pointed at `server`."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        yield official


def sse(text: str) -> list[Any]:
    """The events of a stream, parsed; "[DONE]" stays a string."""
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [event if event == "[DONE]" else json.loads(event) for event in events]
