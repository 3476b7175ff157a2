"""The wings of the application: when they are installed, run and ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

import server.app
from engine.config import EngineConfig
from server.app import create_app
from server.config import ServerConfig
from server.state import AppState
from server.wing import Wing
from tests.support.fake_engine import FakeEngine


def noting(events: list[str], name: str) -> Wing:
    """Return a wing that notes what happens to it."""

    def install(app: FastAPI, spine: AppState) -> None:
        events.append(f"{name} installed")

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        events.append(f"{name} runs")
        try:
            yield
        finally:
            events.append(f"{name} ends")

    run: Callable[[FastAPI], AbstractAsyncContextManager[None]] = running
    return Wing(install=install, run=run)


async def test_wings_run_while_the_engine_runs_and_end_in_the_other_order(
    model: Path, says: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    engine = FakeEngine(says("x"))
    start, stop = engine.start, engine.stop

    async def started() -> None:
        await start()
        events.append("engine starts")

    async def stopped() -> None:
        events.append("engine stops")
        await stop()

    monkeypatch.setattr(engine, "start", started)
    monkeypatch.setattr(engine, "stop", stopped)
    monkeypatch.setattr(server.app, "WINGS", (noting(events, "first"), noting(events, "second")))
    app = create_app(ServerConfig(), EngineConfig(model=str(model)), engine)
    assert events == ["first installed", "second installed"]
    events.clear()
    async with app.router.lifespan_context(app):
        assert events == ["engine starts", "first runs", "second runs"]
    assert events[3:] == ["second ends", "first ends", "engine stops"]
