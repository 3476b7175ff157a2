"""LensQueue: lenses that wait for the engine to be free."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from engine.protocol.lens import MAX_LENS_WAIT, LensRequest, LensResult

log = logging.getLogger(__name__)


class LensQueue:
    """The lenses that were requested, computed one piece at a time between steps.

    `look` yields None between the pieces of a lens, and its result at the end.
    """

    def __init__(self, look: Callable[[LensRequest], Iterator[LensResult | None]]) -> None:
        self.look = look
        self._requests: deque[LensRequest] = deque()
        self._pieces: Iterator[LensResult | None] | None = None  # of the first request
        self._waiting_since: float | None = None  # None: the first request does not wait

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, request: LensRequest) -> None:
        self._requests.append(request)

    def drop(self, ids: Iterable[int]) -> None:
        """Drop the requests with these ids; unknown ids are ignored."""
        dropped = set(ids)
        if self._requests and self._requests[0].id in dropped:
            self._end_first()
        self._requests = deque(r for r in self._requests if r.id not in dropped)

    def advance(self, *, is_free: bool) -> LensResult | None:
        """Compute a piece of the first request, and return its result after the last piece.

        If other requests wait (not `is_free`) it waits, too, and is refused after MAX_LENS_WAIT.
        """
        result = self._next_piece() if is_free else self._refusal()
        if result is not None:
            self._end_first()
        return result

    def _end_first(self) -> None:
        self._requests.popleft()
        self._pieces = self._waiting_since = None

    def _refusal(self) -> LensResult | None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < MAX_LENS_WAIT:
            return None
        return LensResult(self._requests[0].id, error="busy")

    def _next_piece(self) -> LensResult | None:
        self._waiting_since = None
        request = self._requests[0]
        if self._pieces is None:
            self._pieces = self.look(request)
        try:
            return next(self._pieces)
        except Exception:  # a lens must not end the engine
            log.exception("a lens failed")
            return LensResult(request.id, error="failed")
