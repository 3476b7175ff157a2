"""LoopPace: how many requests go on in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class LoopPace:
    """Lets at most `count` callers go on in each turn of the event loop, in their order.

    A request takes a millisecond of the loop. When a thousand arrive together, the loop would
    otherwise begin all of them in one turn, and a short request behind them, or a token of a
    stream, would wait for a second. Everything runs in the event loop's thread.
    """

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def wait(self) -> None:
        """Wait for a place in a turn; with a free place in this one, return at once."""
        if self._left and not self._waiting:
            self._left -= 1
            self._schedule()
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._schedule()
        await place

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_scheduled = False
        self._left = self._count
        while self._left and self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # its request has not left
                place.set_result(None)
                self._left -= 1
        if self._left < self._count or self._waiting:
            self._schedule()
