"""Errors as answers: OpenAI's body, the field at fault by name, nothing about the inside."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from service.errors import EngineUnavailable, InvalidRequest, LacunarError, QueueFull

from .schemas import ErrorBody, ErrorDetail, FieldError

# A slot frees up when some sequence ends; a client that comes back sooner mostly meets the same queue.
RETRY_AFTER_SECONDS = 1


class InvalidBody(InvalidRequest):
    """The body is no JSON object, or a field of it is missing, of a wrong type or out of range."""


def error_body(error: LacunarError) -> dict[str, Any]:
    """The `{"error": {...}}` object for a client."""
    message = error.message
    if isinstance(error, EngineUnavailable):
        # The engine's own words (an exception, a signal, a path) are for the log.
        message = "The server cannot answer now because its engine is stopping or has failed. Retry later."
    detail = ErrorDetail(message=message, type=error.error_type, param=error.param, code=error.code)
    return ErrorBody(error=detail).model_dump()


def error_response(error: LacunarError, *, close: bool = False) -> JSONResponse:
    """The answer to a request that failed with `error`; `close` ends the connection after it."""
    headers = {}
    if isinstance(error, QueueFull | EngineUnavailable):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if close:
        headers["Connection"] = "close"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def internal_error_body(request_id: str) -> dict[str, Any]:
    """What a client learns of a bug: that it was one, and the id under which the log has the rest."""
    message = f"The server failed on this request. Its log has the details under request id {request_id}."
    return ErrorBody(
        error=ErrorDetail(message=message, type="server_error", param=None, code=None)
    ).model_dump()


def from_validation(error: ValidationError) -> InvalidBody:
    """The first problem pydantic found, with the field's path as clients write it."""
    problem = error.errors(include_url=False, include_input=False)[0]
    cause = problem.get("ctx", {}).get("error")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        return InvalidBody(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if isinstance(cause, FieldError):
        return InvalidBody(f"{cause.field}: {message}", param=cause.field)
    if not problem["loc"]:
        return InvalidBody("the body must be a JSON object")
    param = _path(problem["loc"])
    if problem["type"] == "missing":
        return InvalidBody(f"{param} is required, but missing", param=param)
    return InvalidBody(f"{param}: {message[0].lower()}{message[1:]}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content", "str")` -> `messages[0].content`; names of union members are left out."""
    path = ""
    if location[0] == "response_format":
        location = (location[0], *location[2:])  # without the type that chose the union's member
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    return path


def sse_error(body: dict[str, Any]) -> bytes:
    """An error inside a stream whose status is sent already."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
