"""Shares: the parts that each tenant holds of a bounded resource, and how much more it may take.

The amount that a tenant holds and wants must fit into the free part. One tenant alone gets half,
and the next one half of the rest. So there is room for a tenant that holds nothing, and the rule
needs no list of tenants. Switches share the memory of their queues in this way: dynamic thresholds
(Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).

Without API keys, and with one, all requests belong to the tenant "", which may take everything.
"""

from __future__ import annotations

from collections.abc import Iterator


class Shares:
    """The amount of a resource that each tenant holds, in any unit.

    `take` and `give_back` always succeed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        self._held: dict[str, int] = {}  # no zeros

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def has_room(self, amount: int = 1) -> bool:
        """Whether `amount` more fits at all."""
        return self.total + amount <= self.capacity

    def may_take(self, tenant: str, amount: int = 1) -> bool:
        """Whether the tenant may take `amount` more.

        Amounts beyond half that others hold do not count: they take no room from a new tenant.
        """
        if not tenant:
            return self.has_room(amount)
        held = self.held(tenant)
        half = (self.capacity + 1) // 2
        others = sum(min(size, half) for other, size in self if other != tenant)
        return held + amount <= self.capacity - others - held

    def take(self, tenant: str, amount: int = 1) -> None:
        self._set(tenant, self.held(tenant) + amount)

    def give_back(self, tenant: str, amount: int = 1) -> None:
        self._set(tenant, self.held(tenant) - amount)

    def _set(self, tenant: str, held: int) -> None:
        assert held >= 0, "a tenant gives back more than it holds"
        self.total += held - self._held.pop(tenant, 0)
        if held:
            self._held[tenant] = held

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield each tenant with what it holds."""
        return iter(self._held.items())

    @property
    def largest(self) -> str:
        """The tenant that holds most: where something must go, it loses first."""
        return max(self._held, key=self.held)
