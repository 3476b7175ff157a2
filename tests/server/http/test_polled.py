"""Routes that pages poll: they fill neither the log nor the metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import APIRouter

import server.app
from server.glassbox import pages
from server.http.errors import ApiError
from server.http.polled import PolledRoute, polled_paths
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

UI = {"x-penstock-ui": "1"}
SECRET = "sk-of-the-pages"


def new_page() -> APIRouter:
    """The routes of a new page: one that is polled, and no edit elsewhere."""
    router = APIRouter(route_class=PolledRoute)

    @router.get("/ui/api/new/{name}")
    async def new(name: str) -> dict[str, str]:
        if name == "refused":
            raise ApiError(403, "admin_key_required", "This needs a key of --admin-key-file.")
        return {"name": name}

    return router


def asked_once() -> APIRouter:
    router = APIRouter()

    @router.get("/ui/api/other")
    async def other() -> dict[str, str]:
        return {}

    return router


def levels(caplog: pytest.LogCaptureFixture) -> dict[str, set[int]]:
    """Return the levels of the access log's records of each path of the pages' data."""
    found: dict[str, set[int]] = {}
    for record in caplog.records:
        if record.name != "server.access":
            continue
        assert isinstance(record.msg, dict)
        path = record.msg["path"]
        if path.startswith("/ui/api/"):
            found.setdefault(path, set()).add(record.levelno)
    return found


async def count(served: Served) -> float:
    text = (await served.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("penstock:http_requests_total")]
    assert lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("place", [0, None], ids=["listed first", "listed last"])
async def test_new_routes_are_reached_and_logged_as_they_are_declared(
    model: Path,
    says: Callable[[str], Script],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    place: int | None,
) -> None:
    routers = list(server.app.ROUTERS)
    where = len(routers) if place is None else place
    routers[where:where] = [new_page(), asked_once()]
    monkeypatch.setattr(server.app, "ROUTERS", routers)
    async with serving(FakeEngine(says("Hi")), model) as served:
        before = await count(served)
        answer = await served.http.get("/ui/api/new/kettle", headers=UI)
        assert answer.json() == {"name": "kettle"}
        assert (await served.http.get("/ui/api/new/refused", headers=UI)).status_code == 403
        assert await count(served) == before
        assert (await served.http.get("/ui/api/other", headers=UI)).status_code == 200
        assert await count(served) == before + 1
    assert levels(caplog) == {
        "/ui/api/new/kettle": {logging.DEBUG},
        "/ui/api/new/refused": {logging.DEBUG},
        "/ui/api/other": {logging.INFO},
    }


async def test_polls_of_the_pages_are_logged_at_debug_level_with_any_status(
    model: Path, says: Callable[[str], Script], caplog: pytest.LogCaptureFixture
) -> None:
    key = UI | {"authorization": f"Bearer {SECRET}"}
    polls = ("/ui/api/hello", "/ui/api/blocks", "/ui/api/watch")
    others = ("/ui/api/requests", "/ui/api/requests/x", "/ui/api/new", "/ui/api/hello/x")
    async with serving(FakeEngine(says("Hi")), model, api_key=(SECRET,)) as served:
        before = await count_with(served)
        for path in polls:
            assert (await served.http.get(path, headers=UI)).status_code == 401
            assert (await served.http.get(path, headers=key | {"host": "x"})).status_code == 400
        assert (await served.http.get("/ui/api/hello", headers=key)).status_code == 200
        assert await count_with(served) == before
        for path in others:
            await served.http.get(path, headers=key)
        assert await count_with(served) == before + len(others)
    found = levels(caplog)
    assert found.keys() == {*polls, *others}
    assert all(found[path] == {logging.DEBUG} for path in polls)
    assert all(found[path] == {logging.INFO} for path in others)


async def count_with(served: Served) -> float:
    served.http.headers["authorization"] = f"Bearer {SECRET}"
    try:
        return await count(served)
    finally:
        del served.http.headers["authorization"]


def test_polled_paths_are_those_of_polled_routes() -> None:
    [pattern] = polled_paths([asked_once(), new_page(), pages.router])
    assert pattern.fullmatch("/ui/api/new/kettle")
    assert not pattern.fullmatch("/ui/api/new/kettle/lid")
    assert not pattern.fullmatch("/ui/api/other")
