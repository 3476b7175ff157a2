"""TenantTurns: fair turns between tenants, within a priority.

Each tenant has a counter of the tokens that the engine has served it, as in the Virtual Token
Counter (Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588). The next turn
belongs to the tenant with the lowest counter. Prompts count at admission, answers at their end. A
tenant that comes back does not use what it missed: its counter rises to the lowest of the others.

While one tenant has requests, nothing is counted and the order is that of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Turn:
    """The place of one request in the order of service."""

    tenant: str
    priority: int
    id: int
    size: int  # tokens of its prompt
    served: int = 0  # tokens that its tenant will have been served before it
    is_admitted: bool = False  # it keeps its place, also when it is preempted

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower priority value first, then the tenant served less, then the earlier id."""
        return (self.priority, self.served, self.id)


class TenantTurns:
    """The counters of all tenants with open requests."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # requests that have not left; no zeros
        self._served: dict[str, int] = {}  # tokens
        self.is_stale = False  # `count_from` must run before the next admission

    @property
    def are_shared(self) -> bool:
        """Whether several tenants have requests."""
        return len(self._open) > 1

    def join(self, turn: Turn) -> None:
        """Add a new request. Its turn is at the start of its tenant's until the next count."""
        tenant = turn.tenant
        if tenant not in self._open:
            lowest = min((self._served[other] for other in self._open), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), lowest)
        self._open[tenant] += 1
        turn.served = self._served[tenant]
        self.is_stale |= self.are_shared

    def admit(self, turn: Turn) -> None:
        """Count the prompt of a request at its first admission."""
        turn.is_admitted = True
        if self.are_shared:
            self._served[turn.tenant] += turn.size

    def leave(self, turn: Turn, num_outputs: int) -> None:
        """Remove a request that ended with `num_outputs` answer tokens, or was aborted."""
        if self.are_shared:
            self._served[turn.tenant] += num_outputs
            self.is_stale = True
        self._open[turn.tenant] -= 1
        if self._open[turn.tenant]:
            return
        del self._open[turn.tenant]
        if not self.are_shared:  # the last tenant stays behind all that it has been served
            level = max(self._served.values())
            self._served = dict.fromkeys(self._open, level)

    def count_from(self, waiting: Iterable[Turn]) -> None:
        """Set the turns of all waiting requests from the counters."""
        self.is_stale = False
        served = dict(self._served)
        for turn in sorted(waiting, key=lambda turn: (turn.priority, turn.id)):
            if turn.is_admitted:
                continue
            turn.served = served[turn.tenant]
            if self.are_shared:
                served[turn.tenant] += turn.size

    def check(self, tenants: Iterable[str]) -> None:
        """Assert the invariants, given the tenant of each open request."""
        assert self._open == Counter(tenants), "open requests by tenant"
        assert self._open.keys() <= self._served.keys(), "a tenant without a counter"
        assert all(served >= 0 for served in self._served.values())
