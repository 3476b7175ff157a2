"""The stored responses: bounded in number and bytes, and separate for each API key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from server.api.tenant_store import TenantStore

ENTRY_BYTES = 1024  # of Python's objects for one response, besides its JSON


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, as JSON so that its size is known."""

    id: str
    previous: str | None  # id of the response that it continues
    body: bytes  # the response object
    input_items: bytes  # a list: the items of its own input, not of earlier responses

    @property
    def size(self) -> int:
        """The bytes of memory that it takes, rounded up."""
        return len(self.body) + len(self.input_items) + ENTRY_BYTES


class ResponseStore:
    """The most recently used responses of each tenant.

    Using a response also uses those that it continues, the first one last. So a response leaves the
    store before those it continues, and no conversation loses its beginning. A lock protects it,
    because answers may be formatted in a thread.
    """

    def __init__(self, max_bytes: int, max_responses: int) -> None:
        self._responses: TenantStore[StoredResponse] = TenantStore(max_bytes, max_responses)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def bytes(self) -> int:
        """The bytes that all stored responses take."""
        return self._responses.bytes

    @property
    def is_enabled(self) -> bool:
        return self._responses.is_enabled

    def add(self, tenant: str, response: StoredResponse) -> None:
        """Store a response; the least recently used ones of the largest tenant make room.

        One that is larger than the whole store is not stored.
        """
        if not self._responses.has_room_for(response):
            return
        with self._lock:
            self._responses.put(tenant, response.id, response)
            self._use(tenant, response.id)
            self._responses.make_room()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of the tenant, or None if there is none of this id."""
        with self._lock:
            self._use(tenant, response_id)
            return self._responses.find(tenant, response_id)

    def remove(self, tenant: str, response_id: str) -> bool:
        """Delete a response, and return whether it was there."""
        with self._lock:
            return self._responses.drop(tenant, response_id)

    def conversation(self, tenant: str, response_id: str | None) -> list[StoredResponse]:
        """Return the responses up to `response_id`, each the continuation of the one before.

        Raises KeyError with the id of a response that is not in the store.
        """
        with self._lock:
            if response_id is not None:
                self._use(tenant, response_id)
            found = list(self._chain(tenant, response_id))
        missing = found[-1].previous if found else response_id
        if missing is not None:
            raise KeyError(missing)
        return found[::-1]

    def _chain(self, tenant: str, response_id: str | None) -> Iterator[StoredResponse]:
        """Yield a response and those it continues, the latest first, while they are stored."""
        while response_id is not None:
            response = self._responses.find(tenant, response_id)
            if response is None:
                return
            yield response
            response_id = response.previous

    def _use(self, tenant: str, response_id: str) -> None:
        for response in self._chain(tenant, response_id):
            self._responses.use(tenant, response.id)
