"""LineSlots: the open lines of one owner's batches, within the limits of its key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.turns import Turns


class LineSlots:
    """The slots for lines as the batches of one tenant take them.

    `seconds_until_room` returns how long the tenant's key makes its next request wait. A line waits
    before it takes a slot, so that a key with low limits holds no slots that others could use.
    """

    def __init__(self, turns: Turns, tenant: str, seconds_until_room: Callable[[], float]) -> None:
        self._turns = turns
        self._tenant = tenant
        self._seconds_until_room = seconds_until_room

    async def acquire(self) -> None:
        while True:
            wait = self._seconds_until_room()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            await self._turns.acquire(self._tenant)
            if not self._seconds_until_room():
                return
            self.release()

    def release(self) -> None:
        self._turns.release(self._tenant)
