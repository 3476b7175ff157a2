"""EmbedQueue: texts waiting to be embedded. They hold no blocks and take one step each."""

from __future__ import annotations

import bisect

from engine.protocol import EmbedOutput, EmbedRequest
from engine.scheduling.step import EncoderInput


class EmbedQueue:
    """Queue of texts, first come, first served within a priority. Texts are never split."""

    def __init__(self) -> None:
        self.waiting: list[EmbedRequest] = []  # sorted by (priority, id)
        self.in_flight: set[int] = set()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.in_flight)

    def add(self, request: EmbedRequest) -> None:
        bisect.insort(self.waiting, request, key=lambda r: (r.priority, r.id))

    def abort(self, ids: set[int]) -> None:
        """Remove requests from the queue. Results of requests in flight are dropped later."""
        self.waiting = [request for request in self.waiting if request.id not in ids]
        self.in_flight -= ids

    def take(self, budget: int) -> list[EncoderInput]:
        """Take the next texts within `budget` tokens, but at least one text.

        They are sorted by length, so that texts of equal length are computed together.
        """
        count = 0
        for request in self.waiting:
            budget -= len(request.tokens)
            if budget < 0 and count:
                break
            count += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.in_flight |= {request.id for request in taken}
        taken.sort(key=lambda request: len(request.tokens))
        return [EncoderInput(r.id, tuple(r.tokens), r.pooling) for r in taken]

    def retire(self, outputs: list[EmbedOutput]) -> list[EmbedOutput]:
        """Return the outputs whose requests have not been aborted."""
        wanted = [output for output in outputs if output.id in self.in_flight]
        self.in_flight -= {output.id for output in wanted}
        return wanted
