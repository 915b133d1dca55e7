"""Answers that watch their client: server-sent events, and whole answers that stop when nobody waits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import LacunarError, RequestTimeout

from .answers import AnswerFormat
from .choice import Piece
from .errors import error_body, error_response, internal_error_body, sse_error
from .middleware import ClientGone, request_id_of

logger = logging.getLogger("lacunar.api")

Result = TypeVar("Result")

_DONE = b"data: [DONE]\n\n"

# How long a client may take to receive the error that ends its stream.
_FAREWELL_SECONDS = 1.0


async def until_disconnect(work: Coroutine[Any, Any, Result], receive: Receive, deadline: float) -> Result:
    """Run `work` unless the client goes away first or the time is up, which cancels it.

    The request's body must have been read: the next message is the disconnect.

    Args:
        work: what to do.
        receive: the request's messages.
        deadline: in `time.monotonic()`.

    Raises:
        ClientGone: the client went away; `work` has ended.
        RequestTimeout: the time is up; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait(
            {task, gone},
            timeout=max(0.0, deadline - time.monotonic()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if gone.done() and not task.done():
            raise ClientGone
        if not task.done():
            raise RequestTimeout("the answer was not complete within this server's time limit")
        return await task
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(answer: AnswerFormat) -> Response:
    """Run a generation to its end; the answer to a request without `stream`."""
    async with answer.generation as generation, aclosing(generation.pieces()) as pieces:
        texts: list[list[str]] = [[] for _ in generation.choices]
        parts = [Piece() for _ in generation.choices]
        async for choice, piece, _ in pieces:
            texts[choice.index].append(piece.text)
            parts[choice.index].logprobs += piece.logprobs
            parts[choice.index].tool_calls += piece.tool_calls
        for part, text in zip(parts, texts, strict=True):
            part.text = "".join(text)
        body = answer.whole(parts)
    return Response(body.model_dump_json(), media_type="application/json")


class Events(NamedTuple):
    """Server-sent events to be written at once, and when the engine sent the oldest token in them."""

    data: bytes
    sent_seconds: float | None


async def events(
    answer: AnswerFormat, *, include_usage: bool, continuous_usage: bool = False
) -> AsyncGenerator[Events, None]:
    """The server-sent events of a streamed answer."""
    # With include_usage OpenAI sends `"usage": null` in every event but the last, else none at all.
    exclude = None if include_usage else {"usage"}
    async with answer.generation as generation, aclosing(generation.pieces()) as pieces:
        async for choice, piece, sent_seconds in pieces:
            usage = generation.usage if include_usage and continuous_usage else None
            chunks = answer.chunks(choice, piece, usage)
            data = [chunk.model_dump_json(exclude=exclude, exclude_unset=True) for chunk in chunks]
            yield Events(b"".join(map(_event, data)), sent_seconds)
        if include_usage:
            last = answer.usage_chunk(generation.usage).model_dump_json(exclude_unset=True)
            yield Events(_event(last), None)
    yield Events(_DONE, None)


def _event(data: str) -> bytes:
    return b"data: " + data.encode() + b"\n\n"


class EventStream(Response):
    """Sends server-sent events until they end, the time is up, or the client goes away, which closes their
    source at once.

    The status is sent with the first event: what fails before gets a proper error answer. Starlette's own
    streaming response notices a lost client only at its next write, and a queued sequence writes nothing.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[Events, None],
        *,
        deadline: float,
        observe_write: Callable[[float], None],
    ) -> None:
        self._source = source
        self._deadline = deadline
        self._observe_write = observe_write
        self._started = False
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            await until_disconnect(self._send_all(scope, receive, send), receive, self._deadline)
        except RequestTimeout as error:
            farewell = asyncio.ensure_future(self._send_error(error, scope, receive, send))
            await asyncio.wait({farewell}, timeout=_FAREWELL_SECONDS)
            if not farewell.done():  # a client that reads nothing: nothing more can be said to it
                farewell.cancel()
                await asyncio.gather(farewell, return_exceptions=True)
                raise ClientGone from None
        finally:
            await self._source.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for data, sent_seconds in self._source:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send(_body(data))
                if sent_seconds is not None:
                    self._observe_write(max(0.0, time.monotonic() - sent_seconds))
        except LacunarError as error:
            await self._send_error(error, scope, receive, send)
            return
        except Exception:
            if not self._started:
                raise
            request_id = request_id_of(scope)
            logger.exception("request %s failed in its stream", request_id)
            await send(_body(sse_error(internal_error_body(request_id))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, error: LacunarError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        await send(_body(sse_error(error_body(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
