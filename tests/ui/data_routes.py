"""The routes below /ui/api of the application, so that tests try a new route without an edit."""

from __future__ import annotations

from fastapi.routing import APIRoute

from server.app import ROUTERS
from server.http.auth import UI_DATA

# Of the paths with parameters: an address that tests can ask for. It need not exist.
ADDRESSES = {
    "/ui/api/requests/{request_id}": "/ui/api/requests/x",
    "/ui/api/lens/{capture}/{layer}/{head}": "/ui/api/lens/x/0/0",
}


def data_routes() -> list[tuple[str, str]]:
    """Return the method and the path of each route, in the order of their declaration."""
    return [
        (method, route.path)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.path.startswith(UI_DATA)
        for method in sorted(route.methods)
    ]


def address_of(path: str) -> str:
    """Return the address for a route's path. Raises LookupError for unknown parameters."""
    if "{" not in path:
        return path
    if path not in ADDRESSES:
        raise LookupError(
            f"The path {path} has parameters: add it, with an address that a test can ask for, "
            "to ADDRESSES in tests/ui/data_routes.py."
        )
    return ADDRESSES[path]
