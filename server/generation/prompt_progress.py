"""Progress of prompts: what the steps of a request have computed before its first token."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.outputs import PrefillChunk
from server.generation.events import PromptProgress


class ProgressReader:
    """Turns the prefills of one choice into events, each once.

    The first event says what the cache held. A prefill that begins again after a preemption is
    reported when it has passed the last report.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._cached = 0
        self._processed = -1
        self._num_read = 0

    def read(
        self, prefills: Sequence[tuple[float, float, PrefillChunk]], admitted: float
    ) -> list[PromptProgress]:
        """Return the events of the prefills since the last call; `admitted` is when they began."""
        events = []
        for _, end, chunk in prefills[self._num_read :]:
            if self._processed < 0:
                self._cached = self._processed = chunk.start
                events.append(self._event(0.0))
            processed = min(chunk.start + chunk.count, self._total)
            if processed > self._processed:
                self._processed = processed
                events.append(self._event(1000 * max(end - admitted, 0.0)))
        self._num_read = len(prefills)
        return events

    def _event(self, milliseconds: float) -> PromptProgress:
        return PromptProgress(self._total, self._cached, self._processed, milliseconds)
