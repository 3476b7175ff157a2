"""The `route` fixture: a test that uses it runs for every route that generates text."""

from __future__ import annotations

import pytest

from tests.server.api.contract.routes import ROUTES, Route


@pytest.fixture(params=ROUTES, ids=lambda route: route.name)
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found
