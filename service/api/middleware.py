"""What happens around every request: ids, metrics, the access log, the API key, and errors nobody caught.

Pure ASGI: Starlette's BaseHTTPMiddleware hides the client's disconnect from the routes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import LacunarError

from .context import ServerContext
from .errors import error_response, internal_error_body

logger = logging.getLogger("lacunar.api")
access_logger = logging.getLogger("lacunar.access")

# Ids go into logs and headers; anything else is replaced.
_REQUEST_ID = re.compile(rb"^[A-Za-z0-9._:-]{1,128}$")

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}

# Health for orchestrators, metrics for Prometheus: neither usually holds an API key.
# The page at "/" is the same for everyone and asks for the key itself.
OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/health", "/metrics"})

_LOGGED_CHARACTERS = 2000

CLIENT_CLOSED_REQUEST = 499


class ClientGone(Exception):
    """The client closed the connection before its request or its answer was complete."""


class Unauthorized(LacunarError):
    """The API key is missing or wrong."""

    status: ClassVar[int] = 401
    error_type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = "invalid_api_key"


def request_id_of(scope: Scope) -> str:
    """The id that RequestMiddleware gave this request."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def arrival_of(scope: Scope) -> float:
    """`time.monotonic()` when this request's headers were complete."""
    arrived: float = scope["state"]["arrived"]
    return arrived


class RequestMiddleware:
    """Gives each request an id, counts and logs it, and turns unforeseen errors into a bare 500."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given.decode() if given and _REQUEST_ID.match(given) else uuid.uuid4().hex
        arrived = time.monotonic()
        scope.setdefault("state", {}).update(request_id=request_id, arrived=arrived)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if self._context.draining:
                    headers["Connection"] = "close"
            await send(message)

        with self._context.answering():
            try:
                await self._app(scope, receive, send_with_id)
            except ClientGone:
                status = CLIENT_CLOSED_REQUEST
                # What the client has not read so far it never will; closing would wait for it.
                abort = scope["state"].get("abort")
                if abort is not None:
                    abort()
            except Exception:
                logger.exception("request %s failed", request_id)
                if status == 0:
                    response = JSONResponse(internal_error_body(request_id), status_code=500)
                    await response(scope, receive, send_with_id)
                else:
                    raise
            finally:
                self._record(scope, status, time.monotonic() - arrived, request_id)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._context.metrics.http_requests.labels(route, method, str(status)).inc()
        if self._context.settings.access_log:
            level = logging.DEBUG if route in OPEN_PATHS else logging.INFO
            path = scope["path"] if len(scope["path"]) <= 200 else scope["path"][:200] + "..."
            fields = {
                "method": method,
                "path": path,
                "status": status,
                "seconds": round(seconds, 6),
                "request_id": request_id,
            }
            access_logger.log(
                level,
                "%s %r %d %.3f s %s",
                method,
                path,
                status,
                seconds,
                request_id,
                extra={"fields": fields},
            )


def log_body(request_id: str, body: bytes) -> None:
    """For `log_bodies`: what a client sent, in the log."""
    text = body[:_LOGGED_CHARACTERS].decode(errors="replace")
    access_logger.info("body of %s: %s", request_id, text, extra={"fields": {"request_id": request_id}})


class ApiKeyMiddleware:
    """Lets a request through only with one of the API keys, except to OPEN_PATHS."""

    def __init__(self, app: ASGIApp, context: ServerContext, keys: Collection[str]) -> None:
        self._app = app
        self._context = context
        # Digests, so that a comparison takes the same time for keys of any length.
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI scope."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        self._context.metrics.rejections.labels("unauthorized").inc()
        error = Unauthorized("The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.")
        await error_response(error)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = _header(scope, b"x-api-key") or b""
        given = _digest(key.strip())
        # All of them, whether one has matched or not.
        return sum(hmac.compare_digest(given, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Mapping[str, Any], name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
