"""InspectedEngine: an EngineClient whose inside the built-in pages show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.client.interface import EngineClient
from engine.errors import EngineDeadError
from engine.protocol.lens import LensRequest, LensResult
from engine.protocol.watch import Blocks, StepTrace, StepWaits

WatchListener = Callable[[StepTrace | Blocks | EngineDeadError], None]
WaitListener = Callable[[StepWaits], None]


class InspectedEngine(EngineClient, Protocol):
    """The engine's client and test engines are one."""

    async def look(self, request: LensRequest) -> LensResult:
        """Return what a lens shows. It is computed while no request waits; a cancelled call drops
        it. Raises EngineUnavailableError or EngineDeadError."""

    def watch(self, listener: WatchListener | None) -> int:
        """Begin to watch the engine; None ends it. Return the id of the Blocks that answers.
        `listener`, the only one, gets this, and then a StepTrace behind each StepOutputs. At the
        end of the engine it gets the error."""

    def measure_waits(self, listener: WaitListener | None) -> None:
        """Begin to measure how long steps wait for a core; None ends it. `listener`, the only one,
        gets a StepWaits behind each StepOutputs of a step, also those sent before the end."""
