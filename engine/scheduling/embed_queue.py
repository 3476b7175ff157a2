"""EmbedQueue: texts waiting to be embedded. They hold no blocks and take one step each.

A short text should not wait for long ones. So a text lets shorter ones pass that arrive a little
later, a step with a few short tokens does not take a long text in addition, and while several
requests wait a step has one long text at most.
"""

from __future__ import annotations

import bisect

from engine.protocol.embed import EmbedOutput, EmbedRequest
from engine.scheduling.step import EncoderInput
from engine.scheduling.tenant_turns import TenantTurns

# A text of 200 tokens lets shorter ones pass that arrive up to 0.8 s later: about as long as eight
# such texts wait for each other on a busy CPU.
PATIENCE_S = 4e-3  # for each token
GROWTH = 4  # a text has at most this many times the tokens that the step already has,
FREE = 64  # or this many: a step takes hardly longer with them
LONG = 0.25  # of a step's budget: while several requests wait, a step has one such text at most


class EmbedQueue:
    """Queue of texts in order of priority, turn of the tenant, and when each is due.

    They are never split.
    """

    def __init__(self) -> None:
        self.waiting: list[EmbedRequest] = []  # sorted by `_place`
        self.in_flight: set[int] = set()
        self._turns = TenantTurns()  # of those that wait

    def __len__(self) -> int:
        return len(self.waiting) + len(self.in_flight)

    def add(self, request: EmbedRequest) -> None:
        self._turns.join(request.tenant)
        bisect.insort(self.waiting, request, key=_place)

    def abort(self, ids: set[int]) -> None:
        """Remove requests from the queue. Results of requests in flight are dropped later."""
        for request in self.waiting:
            if request.id in ids:
                self._turns.leave(request.tenant)
        self.waiting = [request for request in self.waiting if request.id not in ids]
        self.in_flight -= ids

    def _in_turn(self) -> list[EmbedRequest]:
        """Return the waiting texts in order of service."""
        if not self._turns.are_shared:
            return self.waiting
        turns = self._turns.turns(self.waiting)
        return sorted(self.waiting, key=lambda r: (r.priority, turns[r.id], r.id))

    def take(self, budget: int) -> list[EncoderInput]:
        """Take the next texts within `budget` tokens, but at least one text.

        They are sorted by length, so that texts of equal length are computed together. The texts of
        one request have the same time of arrival.
        """
        are_shared = len({request.arrival for request in self.waiting}) > 1
        taken: list[EmbedRequest] = []
        size, has_long = 0, False
        for request in self._in_turn():
            is_long = are_shared and request.size > LONG * budget
            if taken and request.size > min(budget - size, max(GROWTH * size, FREE)):
                break
            if has_long and is_long:
                continue
            has_long |= is_long
            taken.append(request)
            size += request.size
            self._turns.count(request.tenant, request.size)
        ids = {request.id for request in taken}
        self.abort(ids)  # they leave the queue
        self.in_flight |= ids
        taken.sort(key=lambda request: len(request.tokens))
        return [
            EncoderInput(r.id, tuple(r.tokens), is_pooled=True, skip=r.skip, second=r.second)
            for r in taken
        ]

    def retire(self, outputs: list[EmbedOutput]) -> list[EmbedOutput]:
        """Return the outputs whose requests have not been aborted."""
        wanted = [output for output in outputs if output.id in self.in_flight]
        self.in_flight -= {output.id for output in wanted}
        return wanted


def _place(request: EmbedRequest) -> tuple[int, float, int]:
    due = request.arrival + PATIENCE_S * request.size
    return request.priority, due, request.id
