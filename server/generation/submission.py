"""Submission: the life of the engine requests of one HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from types import TracebackType
from typing import ClassVar, Generic, Self

from engine.client.output_stream import Output, OutputStream
from engine.errors import EngineError, RequestRejectedError
from server.http.errors import ApiError, ClientGone, ClientStalled, StreamBroken
from server.http.rate_limits import RateLimiter
from server.state import AppState
from server.telemetry.observer import AbortReason


class Submission(Generic[Output]):
    """The engine requests of one HTTP request: submitted once, closed once.

    The constructor sends nothing. Use it as a context manager: entering it submits the requests,
    and leaving it closes them with the exception, if any. Subclasses say what is sent (`_send`)
    and consume the outputs (`_stream`). `COUNTED` is the request's field that makes them many.
    """

    COUNTED: ClassVar[str]

    def __init__(
        self, state: AppState, ids: Iterable[int], limiter: RateLimiter | None = None
    ) -> None:
        """`limiter` counts requests and tokens; None: the request's key has no limits."""
        self._client = state.client
        self._limiter = limiter
        self._unfinished = set(ids)
        self._num_requests = len(self._unfinished)
        self._submitted_at = 0.0  # CLOCK_MONOTONIC seconds
        self._stream: OutputStream[Output]
        self._is_accepted = False

    def __enter__(self) -> Self:
        self.submit()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def submit(self) -> None:
        """Send the requests to the engine: all of them, or none if it raises.

        Raises EngineDeadError, EngineOverloadedError, RequestRejectedError, or ApiError if the key
        may not have as many requests at once.
        """
        if self._limiter is not None:
            self._limiter.widen(self._num_requests, self.COUNTED)
        self._submitted_at = time.monotonic()
        try:
            self._send()
        except BaseException as error:
            if self._is_accepted:
                self.close(error)
            else:
                self._narrow()
            raise

    def _narrow(self) -> None:
        if self._limiter is not None:
            self._limiter.narrow(self._num_requests)

    def _send(self) -> None:
        """Send the requests to the engine, and call `_accept` with their stream."""
        raise NotImplementedError

    def _accept(self, stream: OutputStream[Output]) -> None:
        """Keep the stream of the requests, which the engine has from now on."""
        self._stream = stream
        self._is_accepted = True

    async def wait_for_output(self, limit: float | None) -> None:
        """Wait for the first output, up to `limit` seconds. Raises if the requests fail first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._stream.arrival()

    def _finish(self, request_id: int) -> None:
        """Record that a request is complete. Aborts it if the engine has not finished it."""
        self._unfinished.discard(request_id)
        self._stream.finish(request_id)

    def close(self, error: BaseException | None = None) -> None:
        """Abort the unfinished requests; `error` is why the HTTP request ended."""
        reason = None
        if self._unfinished:
            reason = abort_reason(error, draining=self._client.state == "draining")
        self._stream.close()
        self._narrow()
        self._on_close(reason)

    def _on_close(self, reason: AbortReason | None) -> None:
        """Record the end of the requests; `reason` is None if all of them are complete."""


def abort_reason(error: BaseException | None, *, draining: bool) -> AbortReason:
    """Return why a request was aborted, given the exception that ended it."""
    match error:
        case StreamBroken():
            return abort_reason(error.error, draining=draining)
        case ClientStalled():
            return "send_timeout"
        case RequestRejectedError():
            return "rejected"
        case EngineError() if draining:
            return "shutdown"
        case EngineError():
            return "engine"
        case ApiError():
            return "numerical"
        case None | ClientGone() | asyncio.CancelledError():
            return "disconnect"
    return "internal"
