"""Viewer: what one reader of GET /ui/api/watch has not been sent yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.protocol.outputs import EngineStats
from engine.protocol.watch import StepTrace
from server.glassbox.watch.block_map import RequestRow

MOST_BEHIND_S = 2.0  # a reader that is further behind gets `lost` instead of events


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens since the first viewer came."""

    prefilled: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A StepTrace, with what viewers need to know besides. Times are CLOCK_MONOTONIC seconds."""

    number: int  # of the trace, counted since the first viewer came
    received: float
    begin: float  # the later one of the step's launch and the end of the step before
    trace: StepTrace
    changed: Mapping[int, RequestRow]
    stats: EngineStats
    counts: Counts


@dataclass(frozen=True, slots=True)
class Lost:
    """A reader was too far behind. It must ask for the blocks again."""

    at: float  # CLOCK_MONOTONIC seconds


class Viewer:
    """Keeps the steps that were not sent, at most MOST_BEHIND_S seconds of them."""

    def __init__(self) -> None:
        self._steps: deque[TracedStep] = deque()
        self._cuts: deque[int] = deque()  # numbers at which a snapshot was taken
        self._lost_at: float | None = None

    def add(self, step: TracedStep) -> None:
        self._steps.append(step)
        if step.received - self._steps[0].received > MOST_BEHIND_S:
            self.lose(step.received)

    def cut(self, number: int) -> None:
        """Send no frame across this number, so that a reader can compare at a snapshot."""
        self._cuts.append(number)

    def begin(self, number: int) -> None:
        """Forget the steps up to a snapshot."""
        while self._steps and self._steps[0].number <= number:
            self._steps.popleft()

    def lose(self, at: float) -> None:
        """Forget all steps, and tell the reader."""
        self._steps.clear()
        self._lost_at = at

    def take(self) -> list[Lost | Sequence[TracedStep]]:
        """Return what to send, one entry a frame."""
        found: list[Lost | Sequence[TracedStep]] = []
        if self._lost_at is not None:
            found.append(Lost(self._lost_at))
            self._lost_at = None
        while self._cuts:
            number = self._cuts.popleft()
            before: list[TracedStep] = []
            while self._steps and self._steps[0].number <= number:
                before.append(self._steps.popleft())
            if before:
                found.append(before)
        if self._steps:
            found.append(list(self._steps))
            self._steps.clear()
        return found
