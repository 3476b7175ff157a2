"""Lenses: computed one at a time, at most one a second; the last attention weights are kept.

A capture holds attention weights only: no token ids and no text. Only the tenant that made it can
read it, for a minute.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.client.inspection import InspectedEngine
from engine.protocol.lens import (
    MAX_LENS_BYTES,
    MAX_LENS_WAIT,
    AttentionWeights,
    LensRequest,
    LensResult,
)
from server.turns import Turns

INTERVAL = 1.0  # seconds between the starts of two lenses
LIFE = 60.0  # seconds that a capture is kept


class LensBusyError(Exception):
    """Other requests kept the engine busy for MAX_LENS_WAIT seconds."""


class LensTooLargeError(Exception):
    """The attention weights of the wanted layers exceed MAX_LENS_BYTES."""


class LensFailedError(Exception):
    """The engine could not compute a lens; its log has the reason."""


@dataclass(frozen=True, slots=True)
class Capture:
    """The attention weights of one lens."""

    id: str
    tenant: str
    stacks: dict[str, dict[int, AttentionWeights]]  # by stack: its layers, by their number

    @property
    def num_bytes(self) -> int:
        layers = (layer for stack in self.stacks.values() for layer in stack.values())
        return sum(len(layer.weights) + len(layer.scores) for layer in layers)


class LensDesk:
    """Lets one lens at a time reach the engine, and keeps captures."""

    def __init__(self) -> None:
        self._turn = Turns(1)
        self._next = 0.0  # CLOCK_MONOTONIC: the earliest start of the next lens
        self._captures: dict[str, Capture] = {}  # by tenant, the oldest first

    async def look(
        self, client: InspectedEngine, request: LensRequest, tenant: str = ""
    ) -> LensResult:
        """Return the result of a lens. Raises one of the errors above."""
        await self._wait_for_turn(0.0 if request.embeddings else INTERVAL, tenant)
        try:
            result = await client.look(request)
        finally:
            self._turn.release(tenant)
        if result.error == "busy":
            raise LensBusyError
        if result.error == "large":
            raise LensTooLargeError
        if result.error:
            raise LensFailedError
        return result

    async def _wait_for_turn(self, interval: float, tenant: str) -> None:
        """Take the turn, which the caller releases."""
        until = time.monotonic() + MAX_LENS_WAIT
        try:
            async with asyncio.timeout(MAX_LENS_WAIT):
                await self._turn.acquire(tenant)
        except TimeoutError:
            raise LensBusyError from None
        now = time.monotonic()
        start = max(now, self._next) if interval else now
        if start > until:
            self._turn.release(tenant)
            raise LensBusyError
        try:
            await asyncio.sleep(start - now)
        except BaseException:
            self._turn.release(tenant)
            raise
        self._next = max(self._next, start + interval)

    def keep(self, tenant: str, attention: Sequence[AttentionWeights]) -> Capture:
        """Keep the weights for a minute; they replace the tenant's last ones.

        All captures together hold at most MAX_LENS_BYTES. The largest one makes room.
        """
        stacks: dict[str, dict[int, AttentionWeights]] = {}
        for layer in attention:
            stacks.setdefault(layer.stack, {})[layer.layer] = layer
        capture = Capture(secrets.token_urlsafe(12), tenant, stacks)
        self._captures.pop(tenant, None)
        self._captures[tenant] = capture
        while sum(one.num_bytes for one in self._captures.values()) > MAX_LENS_BYTES:
            if len(self._captures) == 1:
                break
            largest = max(self._captures, key=lambda owner: self._captures[owner].num_bytes)
            del self._captures[largest]
        # The timer does not hold the capture: it may be replaced long before.
        asyncio.get_running_loop().call_later(LIFE, self._forget, tenant, capture.id)
        return capture

    def _forget(self, tenant: str, capture_id: str) -> None:
        if self.capture(tenant, capture_id) is not None:
            del self._captures[tenant]

    def capture(self, tenant: str, capture_id: str) -> Capture | None:
        """Return a capture of the tenant, or None if it has no such capture."""
        capture = self._captures.get(tenant)
        return capture if capture is not None and capture.id == capture_id else None
