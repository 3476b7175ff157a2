"""One HTTP/1.1 connection: uvicorn's, but what is not HTTP is refused in the error contract too,
and a client that asks nothing is not kept, least of all where others find no room."""

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

from server.errors import ApiError
from server.middleware import LINGER, answer_headers, new_request_id
from server.service import Service

MAX_HEAD_BYTES = 65536  # of a request's line and headers; to be given to uvicorn as well
IDLE_S = 1.0  # without a request's head, before a connection may have to make room
LOOKED_AT = 1000  # of the open connections, at most, for one that may go

log = structlog.get_logger("server.access")


class Connection(H11Protocol):
    """No request is made of what h11 cannot read, so no middleware sees it."""

    _refused = False
    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_idleness()
        if len(self.connections) > self.config.app.state.most_connections:  # type: ignore[union-attr]
            make_room(self.connections, 1)

    @property
    def idle_since(self) -> float:
        """When it last had a request open, by the loop's clock; infinite where it has one now."""
        timer = self._idle or self.timeout_keep_alive_task
        open_request = self.cycle is not None and not self.cycle.response_complete
        if timer is None or open_request or self._refused or self.transport.is_closing():
            return math.inf
        return timer.when() - self.timeout_keep_alive

    def data_received(self, data: bytes) -> None:
        structlog.contextvars.clear_contextvars()  # an earlier request's
        if not self._refused:
            super().data_received(data)
            self._limit_idleness()

    def _limit_idleness(self) -> None:
        """uvicorn's own timer begins with an answer and ends with the next byte; this one lasts
        until a request's head is there, so that none is held by half a head, a byte at a time."""
        if self.cycle is not None and not self.cycle.response_complete:
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
        if isinstance(exc, TimeoutError) and self.scope:  # of the kernel's --send-timeout
            self.scope["state"]["stalled"] = True
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called while h11's error is handled, which says more than `msg`."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            self.transport.close()
            return
        answer = _refusal(sys.exc_info()[1])
        request_id = new_request_id()
        self._account(answer, request_id)
        body = answer.body(request_id)
        headers = answer_headers(request_id, 0) | {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        phrase = HTTPStatus(answer.status).phrase
        head = h11.Response(status_code=answer.status, headers=list(headers.items()), reason=phrase)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing on a client that still sends would reset the connection: it would not read why.
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)

    def _account(self, answer: ApiError, request_id: str) -> None:
        """What middleware would do; of a request that has begun it does count the end."""
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        if self.cycle is None or self.cycle.response_complete:
            service.metrics.request(answer.status)
        service.metrics.reject(answer.code)
        if service.config.access_log:
            log.info("request", request_id=request_id, status=answer.status, code=answer.code)

    def _unsupported_upgrade_warning(self) -> None:
        """What asks for HTTP/2 (Java's client does, always) is served with HTTP/1.1, as it may be.
        uvicorn would say twice that a library is missing."""


def make_room(connections: Iterable[Any], count: int) -> None:
    """Closes so many of those that have asked for nothing for longest, if any: once there is no
    room, not even a probe of /health is heard."""
    some: list[Connection] = list(itertools.islice(connections, LOOKED_AT))
    latest = asyncio.get_running_loop().time() - IDLE_S
    idle = [connection for connection in some if connection.idle_since < latest]
    for connection in heapq.nsmallest(count, idle, key=lambda connection: connection.idle_since):
        connection.timeout_keep_alive_handler()


def _refusal(error: BaseException | None) -> ApiError:
    if getattr(error, "error_status_hint", 400) == 431:
        text = f"The request's line and headers are longer than {MAX_HEAD_BYTES} bytes."
        return ApiError(431, "headers_too_large", text)
    return ApiError(400, "invalid_http", f"This is not HTTP/1.1: {error}.")
