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

from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import GenerateRequest
from engine.scheduling.sequence import Sequence


class TenantTurns:
    """The counters of all tenants with open requests."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # requests that have not left; no zeros
        self._served: dict[str, int] = {}  # tokens
        self.is_stale = False  # the queue must be ordered before the next admission

    @property
    def are_shared(self) -> bool:
        """Whether several tenants have requests."""
        return len(self._open) > 1

    def join(self, tenant: str) -> int:
        """Add a new request, and return its turn until the queue is ordered."""
        if tenant not in self._open:
            lowest = min((self._served[other] for other in self._open), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), lowest)
        self._open[tenant] += 1
        self.is_stale |= self.are_shared
        return self._served[tenant]

    def count(self, tenant: str, tokens: int) -> None:
        """Count tokens that the tenant was served: those of a prompt at its first admission."""
        if self.are_shared:
            self._served[tenant] += tokens

    def leave(self, tenant: str, num_outputs: int = 0) -> None:
        """Remove a request that ended with `num_outputs` answer tokens, or was aborted."""
        self.count(tenant, num_outputs)
        self.is_stale |= self.are_shared
        self._open -= Counter([tenant])
        if not self.are_shared:  # the last tenant stays behind all that it has been served
            self._served = dict.fromkeys(self._open, max(self._served.values()))

    def turns(self, waiting: Iterable[Sequence | EmbedRequest | GenerateRequest]) -> dict[int, int]:
        """Return the turn of each new request, by its id. The lowest is next.

        A turn is the number of tokens that the tenant will have been served before.
        """
        self.is_stale = False
        turns, served = {}, dict(self._served)
        for request in sorted(waiting, key=lambda request: (request.priority, request.id)):
            turns[request.id] = served[request.tenant]
            if self.are_shared:
                served[request.tenant] += request.size
        return turns

    def check(self, tenants: Iterable[str]) -> None:
        """Assert the invariants, given the tenant of each open request."""
        assert self._open == Counter(tenants), "open requests by tenant"
