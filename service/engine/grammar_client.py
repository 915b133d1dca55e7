"""Grammars for structured output, as the API process sees them: compiled elsewhere, kept here by name.

Compiling happens before a request is admitted, so that a bad grammar is the client's 4xx; in a process of
its own, because it needs torch, which the API process has not, and because a hostile grammar can only be
stopped by killing who compiles it. The engine receives each compiled grammar once and drops it with the last
reference here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from service.errors import InvalidRequest, LacunarError, QueueFull

from .grammar_compiler import (
    Compiled,
    CompileGrammar,
    CompilerOptions,
    FromCompiler,
    GrammarKind,
    Refused,
    Vocabulary,
    frame,
    frame_length,
)
from .protocol import AddGrammar, DropGrammar, SetVocabulary, ToEngine

logger = logging.getLogger("lacunar.engine")

COMPILE_SECONDS = 5.0
MAX_SOURCE_CHARACTERS = 64 * 1024
MAX_COMPILED_BYTES = 8 * 1024**2
MAX_CACHED = 64
MAX_CACHED_BYTES = 64 * 1024**2
# Each waits at most this many times COMPILE_SECONDS for its turn.
MAX_WAITING = 8

# Loading torch, the library and the tokenizer takes about 4 s on an idle core.
_START_SECONDS = 120.0


class Grammar:
    """A grammar that the engine holds for as long as this object lives."""

    def __init__(self, key: int, size_bytes: int, drop: Callable[[int], None]) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self._drop = drop

    def __del__(self) -> None:
        self._drop(self.key)


class GrammarClient:
    """Compiles grammars and tells the engine of them. Belongs to one event loop.

    Args:
        options: how the compiler is started.
        send: sends a message to the engine, in order with the requests.
    """

    def __init__(self, options: CompilerOptions, send: Callable[[ToEngine], None]) -> None:
        self._options = options
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._tasks: set[asyncio.Task[Grammar]] = set()
        self._process: Process | None = None
        self._vocabulary_sent = False
        self._next_key = 0
        self._cache: OrderedDict[bytes, Grammar] = OrderedDict()

    async def compile(self, kind: GrammarKind, source: str) -> Grammar:
        """The grammar, compiled now or before. Keep it until the last request that names it was sent.

        Raises:
            InvalidRequest: it cannot be used, for a reason that the message gives.
            QueueFull: too many others wait to be compiled.
        """
        name = hashlib.blake2b(f"{kind}\0{source}".encode(), digest_size=16).digest()
        if (known := self._lookup(name)) is not None:
            return known
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise InvalidRequest(
                f"it has {len(source)} characters, but at most {MAX_SOURCE_CHARACTERS} are compiled"
            )
        if self._waiting >= MAX_WAITING:
            raise QueueFull(
                f"{self._waiting} grammars are waiting to be compiled already. Retry after a pause."
            )
        # In a task of its own: a client that leaves must not tear a reply in two.
        task = asyncio.create_task(self._in_turn(name, CompileGrammar(kind, source)))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Grammar]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; if nobody does any more, nobody needs to know

    async def _in_turn(self, name: bytes, request: CompileGrammar) -> Grammar:
        self._waiting += 1
        try:
            async with self._turn:
                # Another request may have compiled the same one meanwhile.
                return self._lookup(name) or await self._compile(name, request)
        finally:
            self._waiting -= 1

    def _lookup(self, name: bytes) -> Grammar | None:
        known = self._cache.get(name)
        if known is not None:
            self._cache.move_to_end(name)
        return known

    async def _compile(self, name: bytes, request: CompileGrammar) -> Grammar:
        try:
            process = self._process or await self._start()
            reply = await self._ask(process, request, self._options.seconds + _START_SECONDS)
        except BaseException:
            await self._kill()
            raise
        if isinstance(reply, Refused):
            raise InvalidRequest(reply.message)
        assert isinstance(reply, Compiled)
        key, self._next_key = self._next_key, self._next_key + 1
        self._send(AddGrammar(key, reply.data))
        grammar = self._cache[name] = Grammar(key, len(reply.data), self._drop_soon)
        total = sum(kept.size_bytes for kept in self._cache.values())
        while len(self._cache) > MAX_CACHED or total > MAX_CACHED_BYTES:
            _, oldest = self._cache.popitem(last=False)
            total -= oldest.size_bytes
        return grammar

    async def _start(self) -> Process:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "service.engine.grammar_compiler",
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=environment,
        )
        ready = await self._ask(process, self._options, _START_SECONDS)
        assert isinstance(ready, Vocabulary)
        logger.info("the grammar compiler runs as process %d", process.pid)
        if not self._vocabulary_sent:
            self._vocabulary_sent = True
            self._send(SetVocabulary(ready.data))
        return process

    async def _ask(self, process: Process, message: msgspec.Struct, seconds: float) -> FromCompiler:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(frame(message))
                await process.stdin.drain()
                head = await process.stdout.readexactly(4)
                data = await process.stdout.readexactly(frame_length(head))
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise LacunarError("the grammar compiler has failed") from error
        reply: FromCompiler = msgspec.msgpack.decode(data, type=FromCompiler)
        return reply

    def _drop_soon(self, key: int) -> None:
        # The collector may run in any thread, and sockets belong to one: so by way of the loop.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, DropGrammar(key))

    async def stop(self) -> None:
        """End the compiler's process, if one runs, and what waits for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()

    async def _kill(self) -> None:
        """After this the next grammar starts another process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def library_is_installed() -> bool:
    """Whether this environment can produce structured output at all."""
    return importlib.util.find_spec("xgrammar") is not None
