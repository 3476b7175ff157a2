"""Send requests to a server, and repeat those that it cannot take yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

AWAY = (502, 504)  # what a proxy answers for a server that is away
BUSY = (429, 503)
GONE = ("shutting_down", "engine_unavailable")
LONGEST_RETRY_S = 3600.0  # after which the refusal of a busy server is the reply
WAIT_S = 1.0  # between two attempts, without Retry-After
LONGEST_WAIT_S = 60.0
JSON = {"content-type": "application/json"}


class ServerAway(Exception):
    """The server cannot be reached or is shutting down. The requests can be sent later."""


@dataclass(frozen=True)
class Reply:
    """The answer to one request. `body` is compact JSON; None if the answer was not JSON."""

    status: int
    request_id: str
    body: bytes | None

    @property
    def failed(self) -> bool:
        return self.body is None or not 200 <= self.status < 300


async def _at_once() -> None:
    """Wait for nothing."""


class Sender:
    """Sends requests with `http`.

    `patience` is how many seconds the server may be away. After `longest_retry` seconds the refusal
    of a busy server, or of a key at its limit, is the reply. `room` waits until the server has room
    for a request.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        patience: float,
        longest_retry: float = LONGEST_RETRY_S,
        room: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        self._http = http
        self._patience = patience
        self._longest_retry = longest_retry
        self._room = room
        self._reached_at = time.monotonic()

    async def send(self, path: str, body: bytes) -> Reply:
        """Post a JSON text, and return the answer. Raises ServerAway."""
        first = time.monotonic()
        while True:
            await self._room()
            response = await self._post(path, body)
            if response is not None:
                self._reached_at = time.monotonic()
                is_late = self._reached_at - first > self._longest_retry
                if is_late or not _is_refused_for_now(response):
                    return await _reply(response)
            await asyncio.sleep(_wait(response))

    async def _post(self, url: str, body: bytes) -> httpx2.Response | None:
        """Return the response, or None if the server is away. Raises ServerAway after a while."""
        try:
            response = await self._http.post(url, content=body, headers=JSON)
        except httpx2.TransportError as error:
            cause = str(error) or type(error).__name__
        else:
            _stop_if_cancelled()
            if not _is_away(response):
                return response
            cause = f"it answers with status {response.status_code}"
        if time.monotonic() - self._reached_at >= self._patience:
            raise ServerAway(f"The server is away: {cause}.")
        return None


def _stop_if_cancelled() -> None:
    """Raise CancelledError if this task is being cancelled.

    A server in this process answers a cancelled request with a 503 instead.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _is_away(response: httpx2.Response) -> bool:
    is_leaving = response.status_code == 503 and _error_code(response) in GONE
    return is_leaving or response.status_code in AWAY


def _is_refused_for_now(response: httpx2.Response) -> bool:
    may_retry = response.headers.get("x-should-retry") != "false"
    return may_retry and response.status_code in BUSY


def _error_code(response: httpx2.Response) -> Any:
    try:
        return response.json()["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None


def _wait(response: httpx2.Response | None) -> float:
    """Return the seconds until the next attempt."""
    given = "" if response is None else response.headers.get("retry-after", "")
    return min(float(given), LONGEST_WAIT_S) if given.isdecimal() else WAIT_S


async def _reply(response: httpx2.Response) -> Reply:
    request_id = response.headers.get("x-request-id", "")
    try:
        body = await asyncio.to_thread(_compact, response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Reply(response.status_code, request_id, None)
    return Reply(response.status_code, request_id, body)


def _compact(body: bytes) -> bytes:
    """Return JSON in one line. Raises DecodeError or UnicodeDecodeError."""
    body.decode()
    return msgspec.json.format(body, indent=-1)
