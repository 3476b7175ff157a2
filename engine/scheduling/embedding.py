"""EmbedQueue: texts waiting to become vectors. They hold no blocks and are done in one step."""

from __future__ import annotations

import bisect

from engine.protocol import EmbedOutput, EmbedRequest
from engine.scheduling.step import Encode


class EmbedQueue:
    """First come, first served within a priority; whole texts, as many as a step's budget takes."""

    def __init__(self) -> None:
        self.waiting: list[EmbedRequest] = []  # sorted by (priority, id)
        self.in_flight: set[int] = set()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.in_flight)

    def add(self, request: EmbedRequest) -> None:
        bisect.insort(self.waiting, request, key=lambda r: (r.priority, r.id))

    def abort(self, ids: set[int]) -> None:
        """What waits costs nothing any more; what is in flight is dropped when it returns."""
        self.waiting = [request for request in self.waiting if request.id not in ids]
        self.in_flight -= ids

    def take(self, budget: int) -> list[Encode]:
        """The next texts within `budget` tokens, the first one in any case; by length, so that
        equal ones are computed together."""
        count = 0
        for request in self.waiting:
            budget -= len(request.tokens)
            if budget < 0 and count:
                break
            count += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.in_flight |= {request.id for request in taken}
        taken.sort(key=lambda request: len(request.tokens))
        return [Encode(r.id, tuple(r.tokens), r.pooling) for r in taken]

    def retire(self, outputs: list[EmbedOutput]) -> list[EmbedOutput]:
        """Those of `outputs` that somebody still waits for."""
        wanted = [output for output in outputs if output.id in self.in_flight]
        self.in_flight -= {output.id for output in wanted}
        return wanted
