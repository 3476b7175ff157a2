"""Routes that the built-in pages ask for again and again, which would fill the log."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute


class PolledRoute(APIRoute):
    """A route whose requests are treated as probes: with any status, logged at debug level only.

    Metrics do not count them. A file of such routes has `APIRouter(route_class=PolledRoute)`.
    """


def polled_paths(routers: Iterable[APIRouter]) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of the paths that are polled."""
    return tuple(
        route.path_regex
        for router in routers
        for route in router.routes
        if isinstance(route, PolledRoute)
    )
