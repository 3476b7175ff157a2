"""Turns: a number of slots that the owners of API keys take in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count

from engine.client.shares import Shares


class Turns:
    """Slots for work in this process. A free one goes to the tenant that holds fewest of them.

    Of several such tenants the one whose last turn was longest ago is next; the requests of one
    tenant keep their order. With `leaves_room`, a tenant holds no more than its share, for work so
    long that others should not wait for its end. Everything runs in the event loop's thread.
    """

    def __init__(self, slots: int, *, leaves_room: bool = False) -> None:
        self._shares = Shares(slots)
        self._leaves_room = leaves_room
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # no empty ones
        self._turns = count(1)
        self._last_turn: dict[str, int] = {}  # by tenant

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot, which the caller releases."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.release(tenant)  # it was granted in the same moment
            raise

    def release(self, tenant: str) -> None:
        self._shares.give_back(tenant)
        self._grant()

    def _may_take(self, tenant: str) -> bool:
        return self._shares.has_room() and (not self._leaves_room or self._shares.may_take(tenant))

    def _grant(self) -> None:
        """Give the free slots to those whose turn it is."""
        while tenants := [tenant for tenant in self._waiting if self._may_take(tenant)]:
            tenant = min(tenants, key=self._place)
            turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if turn.cancelled():
                continue
            self._shares.take(tenant)
            self._last_turn[tenant] = next(self._turns)
            turn.set_result(None)

    def _place(self, tenant: str) -> tuple[int, int]:
        return self._shares.held(tenant), self._last_turn.get(tenant, 0)
