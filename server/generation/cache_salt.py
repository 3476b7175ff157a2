"""The salt of the prefix cache: requests share cached prefixes only if their salts are equal."""

from __future__ import annotations

from starlette.requests import Request


def cache_salt_of(request: Request, given: str = "") -> str:
    """Return the salt of a request whose body has the `cache_salt` `given`.

    Where requests need a key, no two pairs of its owner and `cache_salt` have the same salt: the
    length says where the owner ends. An only key counts as well: with --kv-cache-dir, the next
    start may have another one.
    """
    owner: str = request.state.key_owner
    return f"{len(owner)}:{owner}{given}" if owner else given
