"""TenantStore: entries of each tenant, bounded in number and bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from engine.client.shares import Shares


class Sized(Protocol):
    @property
    def size(self) -> int:
        """The bytes of memory that it takes, rounded up."""


Entry = TypeVar("Entry", bound=Sized)


class TenantStore(Generic[Entry]):
    """The most recently used entries of each tenant, by id. Not thread-safe.

    The tenant that holds most makes room, so that no tenant removes what others have stored.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._entries: dict[str, OrderedDict[str, Entry]] = {}  # by tenant; none empty
        self._bytes = Shares(max_bytes)
        self._number = Shares(max_entries)

    def __len__(self) -> int:
        return self._number.total

    @property
    def bytes(self) -> int:
        """The bytes that all entries take."""
        return self._bytes.total

    @property
    def is_enabled(self) -> bool:
        return self._bytes.capacity > 0 and self._number.capacity > 0

    def has_room_for(self, entry: Entry) -> bool:
        """Return whether `entry` is at most as large as the whole store."""
        return entry.size <= self._bytes.capacity

    def put(self, tenant: str, key: str, entry: Entry) -> None:
        """Store an entry as the one used last, and make no room for it."""
        self.drop(tenant, key)
        self._entries.setdefault(tenant, OrderedDict())[key] = entry
        self._bytes.take(tenant, entry.size)
        self._number.take(tenant)

    def make_room(self) -> None:
        """Drop the least recently used entries of the largest tenant while there are too many."""
        for held in (self._bytes, self._number):
            while not held.has_room(0):
                largest = held.largest
                self.drop(largest, next(iter(self._entries[largest])))

    def find(self, tenant: str, key: str) -> Entry | None:
        """Return an entry of the tenant, or None, without using it."""
        return self.get(tenant, {}).get(key)

    def get(self, tenant: str, default: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """Return the entries of a tenant by id, the one used last at the end, or `default`."""
        return self._entries.get(tenant, default)

    def use(self, tenant: str, key: str) -> None:
        """Make an entry that is stored the one used last."""
        self._entries[tenant].move_to_end(key)

    def drop(self, tenant: str, key: str) -> bool:
        """Delete an entry, and return whether it was there."""
        dropped = self.find(tenant, key)
        if dropped is None:
            return False
        mine = self._entries[tenant]
        del mine[key]
        if not mine:
            del self._entries[tenant]
        self._bytes.give_back(tenant, dropped.size)
        self._number.give_back(tenant)
        return True
