"""One HTTP/1.1 connection, based on uvicorn's h11 protocol.

Malformed HTTP is answered with an error in the API's format. Connections without a request are
closed after a timeout, or earlier if new connections need their file descriptors.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import sys
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.boundary import LINGER, answer_headers, new_request_id
from server.http.counts import RequestCounts
from server.http.errors import ApiError
from server.http.framing import MAX_HEAD_BYTES, BoundedConnection

IDLE_S = 1.0  # a connection idle for longer may be closed to make room
LOOKED_AT = 1000  # at most this many connections are searched for idle ones
MAX_TOLD = 200  # characters of h11's message, which may quote the line

log = structlog.get_logger("server.access")


class Connection(H11Protocol):
    """An HTTP/1.1 connection that answers malformed requests itself.

    h11 creates no request from them, so no middleware sees them. If more than `max_connections`
    are open, one that is idle is closed.
    """

    _refused = False
    _idle: asyncio.TimerHandle | None = None

    def __init__(
        self,
        *args: Any,
        metrics: RequestCounts,
        access_log: bool,
        max_connections: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection()
        self._metrics = metrics
        self._access_log = access_log
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_idleness()
        if len(self.connections) > self._max_connections:
            make_room(self.connections, 1)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def idle_since(self) -> float:
        """The loop time at which the connection became idle.

        Infinity if a request is open or the connection is closing.
        """
        timer = self._idle or self.timeout_keep_alive_task
        if timer is None or self._is_answering or self._refused or self.transport.is_closing():
            return math.inf
        return timer.when() - self.timeout_keep_alive

    def data_received(self, data: bytes) -> None:
        structlog.contextvars.clear_contextvars()  # set by an earlier request
        if not self._refused:
            super().data_received(data)
            self._limit_idleness()

    def _limit_idleness(self) -> None:
        """Run a timer that closes the connection unless a complete request head arrives.

        uvicorn's keep-alive timer starts after a response and stops at the next byte. A client
        could then hold the connection by sending a head one byte at a time.
        """
        if self._is_answering:
            self._end_idleness()
        elif self._idle is None:
            handler = self.timeout_keep_alive_handler
            self._idle = self.loop.call_later(self.timeout_keep_alive, handler)

    def _end_idleness(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_idleness()
        if isinstance(exc, TimeoutError) and self.scope:  # TCP_USER_TIMEOUT (--send-timeout)
            self.scope["state"]["stalled"] = True
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a 400 or 431, then close the connection.

        uvicorn calls this while it handles h11's exception, which says more than `msg`.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has begun
            self.transport.close()
            return
        answer = _refusal(sys.exc_info()[1])
        request_id = new_request_id()
        self._account(answer, request_id)
        path = self.cycle.scope["path"] if self._is_answering else ""
        body = answer.body(request_id, path)
        headers = answer_headers(request_id, 0) | {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        phrase = HTTPStatus(answer.status).phrase
        head = h11.Response(status_code=answer.status, headers=list(headers.items()), reason=phrase)
        sent = h11.Data(data=body)
        if self._is_answering:  # the body is malformed, and the route must not answer, too
            if self.cycle.scope["method"] == "HEAD":
                sent = h11.Data(data=b"")
            self.cycle.waiting_for_100_continue = False
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        for event in (head, sent, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing while the client still sends would reset the connection and lose the response.
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)

    def _account(self, answer: ApiError, request_id: str) -> None:
        """Count and log the refusal, as RequestBoundary does for well-formed requests.

        If a request is open, RequestBoundary counts it when it ends.
        """
        if not self._is_answering:
            self._metrics.request(answer.status)
        self._metrics.reject(answer.code)
        if self._access_log:
            log.info("request", request_id=request_id, status=answer.status, code=answer.code)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an offer to upgrade to HTTP/2 and serve the request over HTTP/1.1.

        A server may do so (RFC 9110, section 7.8), and Java's client always makes the offer.
        uvicorn would log twice that a library is missing.
        """


def make_room(connections: Iterable[Any], count: int) -> None:
    """Close the `count` connections that have been idle longest, if longer than IDLE_S.

    Without free file descriptors, the server could not even answer a /health probe.
    """
    some: list[Connection] = list(itertools.islice(connections, LOOKED_AT))
    latest = asyncio.get_running_loop().time() - IDLE_S
    idle = [connection for connection in some if connection.idle_since < latest]
    for connection in heapq.nsmallest(count, idle, key=lambda connection: connection.idle_since):
        connection.timeout_keep_alive_handler()


def _refusal(error: BaseException | None) -> ApiError:
    if getattr(error, "error_status_hint", 400) == 431:
        text = (
            f"The request line and headers, or a body's chunk extensions and trailers, are longer "
            f"than {MAX_HEAD_BYTES} bytes."
        )
        return ApiError(431, "headers_too_large", text)
    text = f"The request is not valid HTTP/1.1: {str(error)[:MAX_TOLD]}."
    return ApiError(400, "invalid_http", text)
