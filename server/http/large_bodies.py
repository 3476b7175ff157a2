"""LargeBodies: request bodies of many bytes are parsed in turn, and a crowd of small ones, too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from server.http.body import LARGE
from server.http.loop_pace import LoopPace
from server.turns import Turns

SMALL_AT_ONCE = 2  # small bodies that are parsed in one turn of the event loop
PAUSE = 3  # pause after a large body, as a multiple of its processing time


class LargeBodies:
    """Lets large bodies take turns, because parsing megabytes of JSON blocks the event loop.

    Large bodies are parsed one at a time. After each one, streams and small requests get PAUSE
    times the time that it took. A few small bodies are parsed in each turn of the event loop.
    """

    def __init__(self) -> None:
        self._turns = Turns(1)
        self._pace = LoopPace(SMALL_AT_ONCE)

    @contextlib.asynccontextmanager
    async def turn(self, size: int, tenant: str) -> AsyncIterator[None]:
        """Wait for the turn of a body of `size` bytes. A small body waits only for a crowd."""
        if size < LARGE:
            await self._pace.wait()
            yield
            return
        await self._turns.acquire(tenant)
        begin = time.perf_counter()
        try:
            yield
        finally:
            rest = PAUSE * (time.perf_counter() - begin)
            asyncio.get_running_loop().call_later(rest, self._turns.release, tenant)
