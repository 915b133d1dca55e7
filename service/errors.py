"""Every error a user can meet. Each class carries its HTTP status and OpenAI error type."""

from __future__ import annotations

from typing import ClassVar


class LacunarError(Exception):
    """Base of all errors that Lacunar raises on purpose.

    Attributes:
        status: HTTP status the API answers with.
        error_type: `error.type` in OpenAI's error body.
        code: `error.code`, or None.
        param: the request field at fault, or None.
    """

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(LacunarError):
    """The client sent something that cannot be served; `param` names the field."""

    status = 400
    error_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and max_tokens, exceed the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(LacunarError):
    """The `model` field names no model that is served here."""

    status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"


class RequestTooLarge(LacunarError):
    """The body is over `max_body_bytes`."""

    status = 413
    error_type = "invalid_request_error"


class QueueFull(LacunarError):
    """The engine's bounded queue is full; the client should retry after a pause."""

    status = 429
    error_type = "rate_limit_error"
    code = "queue_full"


class EngineUnavailable(LacunarError):
    """The engine is stopping or has died; no request can be taken."""

    status = 503
    error_type = "server_error"
    code = "engine_unavailable"


class BodyTimeout(LacunarError):
    """The client did not send its whole body in time."""

    status = 408
    error_type = "invalid_request_error"
    code = "body_timeout"


class RequestTimeout(LacunarError):
    """The answer was not complete within `request_seconds`."""

    status = 504
    error_type = "timeout_error"
    code = "request_timeout"


class StartupError(LacunarError):
    """The server cannot start; the message says what was expected, what was found and where."""


class CheckpointError(StartupError):
    """A checkpoint file is missing, truncated or inconsistent. Names the file and the tensor."""


class SettingsError(StartupError):
    """A setting is unknown or its value is not allowed."""


class BackendUnavailable(StartupError):
    """This build or this machine has no kernel for what was asked."""
