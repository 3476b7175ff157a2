"""EmbedQueue: texts waiting to be embedded. They hold no blocks and take one step each."""

from __future__ import annotations

import bisect

from engine.protocol import EmbedOutput, EmbedRequest
from engine.scheduling.step import EncoderInput
from engine.scheduling.tenant_turns import TenantTurns, Turn


class EmbedQueue:
    """Queue of texts in order of priority, turn of the tenant and arrival. They are never split."""

    def __init__(self) -> None:
        self.waiting: list[EmbedRequest] = []  # sorted by rank
        self.in_flight: set[int] = set()
        self._turns = TenantTurns()
        self._turn_of: dict[int, Turn] = {}  # by id, of all texts that wait or are in flight

    def __len__(self) -> int:
        return len(self.waiting) + len(self.in_flight)

    def _rank(self, request: EmbedRequest) -> tuple[int, int, int]:
        return self._turn_of[request.id].rank

    def add(self, request: EmbedRequest) -> None:
        turn = Turn(request.tenant, request.priority, request.id, request.size)
        self._turns.join(turn)
        self._turn_of[request.id] = turn
        bisect.insort(self.waiting, request, key=self._rank)

    def _forget(self, ids: set[int]) -> None:
        for request_id in ids & self._turn_of.keys():
            self._turns.leave(self._turn_of.pop(request_id), 0)

    def abort(self, ids: set[int]) -> None:
        """Remove requests from the queue. Results of requests in flight are dropped later."""
        self.waiting = [request for request in self.waiting if request.id not in ids]
        self.in_flight -= ids
        self._forget(ids)

    def take(self, budget: int) -> list[EncoderInput]:
        """Take the next texts within `budget` tokens, but at least one text.

        They are sorted by length, so that texts of equal length are computed together.
        """
        if self._turns.is_stale:
            self._turns.count_from([self._turn_of[request.id] for request in self.waiting])
            self.waiting.sort(key=self._rank)
        count = 0
        for request in self.waiting:
            budget -= len(request.tokens)
            if budget < 0 and count:
                break
            count += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.in_flight |= {request.id for request in taken}
        for request in taken:
            self._turns.admit(self._turn_of[request.id])
        taken.sort(key=lambda request: len(request.tokens))
        return [EncoderInput(r.id, tuple(r.tokens), r.pooling) for r in taken]

    def retire(self, outputs: list[EmbedOutput]) -> list[EmbedOutput]:
        """Return the outputs whose requests have not been aborted."""
        wanted = [output for output in outputs if output.id in self.in_flight]
        finished = {output.id for output in wanted}
        self.in_flight -= finished
        self._forget(finished)
        return wanted
