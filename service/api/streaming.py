"""Answers that watch their client: server-sent events, and whole answers that stop when nobody waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import LacunarError

from .answers import AnswerFormat
from .errors import error_body, error_response, internal_error_body, sse_error
from .middleware import ClientGone, request_id_of

logger = logging.getLogger("lacunar.api")

Result = TypeVar("Result")

_DONE = b"data: [DONE]\n\n"


async def until_disconnect(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Run `work` unless the client goes away first, which cancels it.

    The request's body must have been read: the next message is the disconnect.

    Raises:
        ClientGone: the client went away; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
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
        logprobs: list[list[Any]] = [[] for _ in generation.choices]
        async for choice, piece in pieces:
            texts[choice.index].append(piece.text)
            logprobs[choice.index].extend(piece.logprobs)
        body = answer.whole(["".join(parts) for parts in texts], logprobs)
    return Response(body.model_dump_json(), media_type="application/json")


async def events(answer: AnswerFormat, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer."""
    # With include_usage OpenAI sends `"usage": null` in every event but the last, else none at all.
    exclude = None if include_usage else {"usage"}
    async with answer.generation as generation, aclosing(generation.pieces()) as pieces:
        async for choice, piece in pieces:
            chunk = answer.chunk(choice, piece)
            yield _event(chunk.model_dump_json(exclude=exclude, exclude_unset=True))
        if include_usage:
            yield _event(answer.usage_chunk(generation.usage).model_dump_json(exclude_unset=True))
    yield _DONE


def _event(data: str) -> bytes:
    return b"data: " + data.encode() + b"\n\n"


class EventStream(Response):
    """Sends server-sent events until they end or the client goes away, which closes their source at once.

    The status is sent with the first event: what fails before gets a proper error answer. Starlette's own
    streaming response notices a lost client only at its next write, and a queued sequence writes nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        self._source = source
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            await until_disconnect(self._send_all(scope, receive, send), receive)
        finally:
            await self._source.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for event in self._source:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except LacunarError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await send(_body(sse_error(error_body(error))))
        except Exception:
            if not started:
                raise
            request_id = request_id_of(scope)
            logger.exception("request %s failed in its stream", request_id)
            await send(_body(sse_error(internal_error_body(request_id))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
