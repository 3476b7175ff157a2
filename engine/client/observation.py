"""Observation: the listeners of what the engine reports about itself, one of each kind."""

from __future__ import annotations

from engine.client.inspection import WaitListener, WatchListener
from engine.errors import EngineDeadError
from engine.protocol.watch import Blocks, StepTrace, StepWaits


class Observation:
    """Hands reports to their listeners. Those without one were sent before the engine knew."""

    def __init__(self) -> None:
        self.watcher: WatchListener | None = None
        self.awaited = 0  # id of a Watch whose Blocks has not come; 0: none
        self.wait_listener: WaitListener | None = None

    def take(self, message: StepTrace | Blocks | StepWaits) -> None:
        match message:
            case StepWaits():
                if self.wait_listener is not None:
                    self.wait_listener(message)
                return
            case Blocks() if message.id == self.awaited:
                self.awaited = 0
        if self.watcher is not None:
            self.watcher(message)

    def fail(self, death: EngineDeadError) -> None:
        if self.watcher is not None:
            self.watcher(death)
