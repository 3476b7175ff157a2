"""The API keys of a server: who has them, and what they may do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.applications import Starlette

from server.http.key_limits import NO_LIMITS, ApiKey
from server.http.rate_limits import RateLimiter

LABEL_DIGITS = 8  # of a key's SHA-256 digest, if the key has no label


class ApiKeys:
    """SHA-256 digests of the keys that `read` returns, and a limiter for each key with limits.

    Without keys, requests need none. Raises ConfigError as `read` does.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[ApiKey]],
        limit: Callable[[ApiKey], RateLimiter] = lambda key: RateLimiter(key.limits),
    ) -> None:
        self._read = read
        self._limit = limit
        self._digests: list[bytes] = []
        self._admins: frozenset[str] = frozenset()  # names of the owners of admin keys
        self._prioritizing: frozenset[str] = frozenset()  # names of those who may set `priority`
        self._limiters: dict[str, RateLimiter] = {}  # by name of the owner
        self._labels: dict[str, str] = {}  # by name of the owner
        self.reload()

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Read the keys again. If that raises ConfigError, the keys are unchanged.

        A key whose limits are the same as before keeps its counts.
        """
        keys = self._read()
        limiters = {}
        for key in keys:
            name = key.digest.hex()
            known = self._limiters.get(name)
            if known is not None and known.limits == key.limits:
                limiters[name] = known
            elif key.limits != NO_LIMITS:
                limiters[name] = self._limit(key)
        self._digests = [key.digest for key in keys]
        self._admins = frozenset(key.digest.hex() for key in keys if key.is_admin)
        self._prioritizing = frozenset(
            key.digest.hex() for key in keys if key.may_prioritize or key.is_admin
        )
        self._limiters = limiters
        self._labels = {key.digest.hex(): key.label for key in keys if key.label}

    def is_admin(self, name: str | None) -> bool:
        """Whether the owner that `find` has named has an admin key; without keys, everyone."""
        return not self._digests or name in self._admins

    def may_prioritize(self, name: str | None) -> bool:
        """Whether the owner that `find` has named may set `priority`; without keys, everyone."""
        return not self._digests or name in self._prioritizing

    def tenant(self, name: str) -> str:
        """Return how the owner that `find` has named is kept apart from others; "" if alone."""
        return name if len(self._digests) > 1 else ""

    def owner(self, tenant: str) -> str:
        """Return the name of a tenant: with one key, that of its owner."""
        if not tenant and len(self._digests) == 1:
            return self._digests[0].hex()
        return tenant

    def seconds_until_room(self, tenant: str) -> float:
        """Return how long the key of a tenant makes its next request wait."""
        limiter = self.limiter(self.owner(tenant))
        return 0.0 if limiter is None else limiter.seconds_until_room()

    def find(self, key: bytes) -> str | None:
        """Return a name for the owner of `key` (its hex digest), or None if the key is invalid.

        Compares all keys, so that the time taken reveals nothing about them.
        """
        given = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if any(matches) else None

    def label(self, name: str) -> str | None:
        """Return what the log calls the owner that `find` has named; None for no key."""
        return self._labels.get(name, name[:LABEL_DIGITS]) or None

    def limiter(self, name: str) -> RateLimiter | None:
        """Return the limiter of the owner that `find` has named; None if there are no limits."""
        return self._limiters.get(name)


def keys_of(app: Starlette) -> ApiKeys:
    """Return the keys of an application; a route has it as `request.app`."""
    keys = app.state.keys
    assert isinstance(keys, ApiKeys)
    return keys
