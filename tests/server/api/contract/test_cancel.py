"""Every route: a client that leaves ends its request; one that stays has it finished."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.api.contract.routes import Route
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving


async def connect(served: Served, route: Route, **fields: object) -> asyncio.StreamWriter:
    """Send a request on a connection of its own, and return that."""
    body = json.dumps({**route.body, **fields}).encode()
    _, writer = await asyncio.open_connection(*served.address)
    head = f"POST {route.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return writer


@pytest.mark.variants(18)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "generating"])
async def test_client_that_leaves_aborts_its_request(
    model: Path,
    encode: Callable[[str], list[int]],
    route: Route,
    stream: bool,
    when: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(lambda request: encode("a"), delay=0.01)
    async with serving(engine, model) as served:
        if when == "queued":
            engine.gate.clear()
        writer = await connect(served, route, stream=stream, **{route.limit: 400})
        await eventually(lambda: engine.busy, "the request runs")
        if when == "generating":
            await eventually(lambda: engine.stats.step > 3, "tokens come")
        writer.transport.abort()
        await eventually(lambda: engine.aborted == [1], "it is aborted")
        assert not engine.running
        engine.gate.set()
        assert await served.metric("aborts_total", reason="disconnect") == 1
        assert await served.metric("aborts_total") == 1
        await eventually(lambda: "499" in caplog.text, "logged")
        assert "Traceback" not in caplog.text


async def test_finished_request_is_not_aborted(served: Served, route: Route) -> None:
    for stream in (False, True):
        assert (await route.post(served, stream=stream)).status_code == 200
    assert served.engine.aborted == []
    assert await served.metric("aborts_total") == 0
