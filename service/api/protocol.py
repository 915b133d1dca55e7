"""uvicorn's HTTP/1.1 protocol with the limits it lacks: on a request's head, its time, and on connections.

Without them a client can send header bytes for ever, or open a connection and say nothing, and each costs
memory and a file descriptor until the process has none left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.settings import Settings

logger = logging.getLogger("lacunar.api")

_HEAD_SECONDS = 20.0
# How long what a refused client still sends is read and dropped. Closed with bytes unread, TCP resets the
# connection, and a reset may overtake the answer.
_LINGER_SECONDS = 5.0


class _Refused(Exception):
    """Ends the parsing of a request."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. Make a subclass for a server's settings with `limited_protocol`.

    Attributes:
        max_header_bytes: longest request line and headers together.
        max_connections: further connections are closed at once.
    """

    max_header_bytes: ClassVar[int]
    max_connections: ClassVar[int]

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._in_head = True
        self._head_bytes = 0
        self._refusal: tuple[int, str] | None = None
        # A client has this long to begin its first request, as for each further one.
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(
            self.timeout_keep_alive, self._close_late
        )
        self._head_begun = False
        self._lingering = False
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            # Finds peers that are gone without a word, sooner or later.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if len(self.connections) > self.max_connections:
            logger.warning("refused a connection: %d are open", len(self.connections) - 1)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._cancel_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._lingering:
            return
        self._message_ended = False
        super().data_received(data)
        if not self._in_head or self._message_ended or self._lingering or self.transport.is_closing():
            # Where a message ended, only the next packet surely belongs to another one's head.
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.max_header_bytes:
            self._refusal = self._too_large()
            self.send_400_response("")
        elif not self._head_begun and self._head_bytes:
            self._head_begun = True
            self._cancel_head_timer()
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self._refuse_late)

    def on_message_begin(self) -> None:
        """See HttpToolsProtocol."""
        super().on_message_begin()
        self.scope["state"]["abort"] = self.transport.abort

    def on_headers_complete(self) -> None:
        """See HttpToolsProtocol."""
        self._in_head = False
        self._head_begun = False
        self._head_bytes = 0
        self._cancel_head_timer()
        # Four bytes a line for ": " and the line's end.
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            self._refusal = self._too_large()
            raise _Refused
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """See HttpToolsProtocol."""
        super().on_message_complete()
        self._in_head = True
        self._message_ended = True

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, or none that is taken, in the shape of every other error."""
        status, message = self._refusal or (400, "this is not a valid HTTP request")
        detail = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": detail}).encode()
        head = (
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
        )
        self.transport.write(STATUS_LINE[status] + head + b"\r\n\r\n" + body)
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # and what still comes of the answer under way is dropped
            return
        self._lingering = True
        self._cancel_head_timer()
        self._head_timer = self.loop.call_later(_LINGER_SECONDS, self._close_late)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _too_large(self) -> tuple[int, str]:
        return (
            431,
            f"the request's headers are larger than the {self.max_header_bytes} bytes that are accepted",
        )

    def _refuse_late(self) -> None:
        self._head_timer = None
        if not self._lingering and not self.transport.is_closing():
            self._refusal = 408, f"the request's headers did not arrive within {_HEAD_SECONDS:g} s"
            self.send_400_response("")

    def _close_late(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def limited_protocol(settings: Settings) -> type[LimitedHttpProtocol]:
    """The protocol of one server."""
    return type(
        "ServerProtocol",
        (LimitedHttpProtocol,),
        {
            "max_header_bytes": settings.max_header_bytes,
            "max_connections": settings.max_connections,
        },
    )
