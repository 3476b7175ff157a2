"""The salt of the prefix cache: requests share cached prefixes only if their salts are equal."""

from __future__ import annotations

from starlette.requests import Request


def cache_salt_of(request: Request, given: str = "") -> str:
    """Return the salt of a request whose body has the `cache_salt` `given`.

    Where requests have tenants, no two pairs of tenant and `cache_salt` have the same salt: the
    length says where the tenant ends.
    """
    tenant: str = request.state.tenant
    return f"{len(tenant)}:{tenant}{given}" if tenant else given
