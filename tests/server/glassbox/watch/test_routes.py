"""GET /ui/api/watch and /ui/api/blocks: who may watch, how many, and what a viewer costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import pytest

from server.glassbox.watch.live_engine import MOST_VIEWERS
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving

UI = {"x-penstock-ui": "1"}


class View:
    """An open stream of /ui/api/watch."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self, name: str = "frame") -> dict[str, Any]:
        """Return the next event of this name."""
        async with asyncio.timeout(10):
            found = ""
            async for line in self._lines:
                if line.startswith("event: "):
                    found = line.removeprefix("event: ")
                elif line.startswith("data: ") and found == name:
                    document: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    return document
        raise AssertionError(f"the stream ended without {name}")


@contextlib.asynccontextmanager
async def watching(served: Served, key: str = "", blocks: int = 1) -> AsyncIterator[View]:
    headers = {**UI, **({"authorization": f"Bearer {key}"} if key else {})}
    url = f"/ui/api/watch?blocks={blocks}"
    async with served.http.stream("GET", url, headers=headers) as response:
        assert response.status_code == 200
        yield View(response)


async def test_viewer_sees_a_request_come_and_end(served: Served) -> None:
    async with watching(served) as view:
        hello = await view.next("hello")
        assert (hello["role"], hello["requests"], hello["num_blocks"]) == ("admin", [], 64)
        response = await served.complete(max_tokens=4, ignore_eos=True)
        frame = await view.next()
        [row] = frame["requests"]
        [request] = served.engine.requests
        assert row[:5] == [request.id, "length", len(request.prompt), 0, 4]
        assert row[-1] == response.headers["x-request-id"]
        assert len(frame["steps"]) == 4
        assert frame["kv"][0] == ["take", request.id, 0, 0, [request.id]]
        assert frame["kv"][-1] == ["end", request.id]
    await eventually(lambda: served.engine.watcher is None, "the watch has ended")
    assert served.engine.watch_calls == [True, False]


async def test_frames_without_blocks_list_the_running_requests(served: Served) -> None:
    async with watching(served, blocks=0) as view:
        hello = await view.next("hello")
        assert "findable" not in hello
        served.engine.delay = 0.05
        task = asyncio.create_task(served.complete(max_tokens=20, ignore_eos=True))
        frame = await view.next()
        assert "kv" not in frame
        [entry] = frame["requests"]
        assert (entry["state"], entry["blocks"]) == ("running", 1)
        await task


async def test_server_without_viewers_never_asks_the_engine_to_watch(served: Served) -> None:
    await served.chat(max_tokens=3)
    await served.http.get("/ui/api/requests", headers=UI)
    assert served.engine.watch_calls == []
    assert served.engine.watcher is None


@pytest.mark.parametrize("path", ["/ui/api/watch", "/ui/api/blocks"])
async def test_route_without_the_header_is_refused(served: Served, path: str) -> None:
    response = await served.http.get(path)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "missing_header"


async def test_route_without_ui_is_not_found(model: Path, says: Any) -> None:
    async with serving(FakeEngine(says("Hi")), model, ui=False) as served:
        assert (await served.http.get("/ui/api/watch", headers=UI)).status_code == 404
        assert (await served.http.get("/ui/api/blocks", headers=UI)).status_code == 404


async def test_invalid_parameter_is_refused(served: Served) -> None:
    response = await served.http.get("/ui/api/watch?blocks=yes", headers=UI)
    assert response.json()["error"]["param"] == "blocks"


async def test_fifth_viewer_gets_503_until_one_leaves(served: Served) -> None:
    async with contextlib.AsyncExitStack() as stack:
        views = [await stack.enter_async_context(watching(served)) for _ in range(MOST_VIEWERS)]
        for view in views:
            await view.next("hello")
        refused = await served.http.get("/ui/api/watch", headers=UI)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_viewers"
        assert refused.headers["retry-after"]
        assert (await served.http.get("/ui/api/blocks", headers=UI)).status_code == 200
        await views[0].response.aclose()
        live = served.app.state.glassbox.live
        await eventually(lambda: live.num_viewers == MOST_VIEWERS - 1, "a viewer has left")
        async with watching(served) as view:
            await view.next("hello")


async def test_plain_key_gets_its_own_requests_only(model: Path, says: Any, tmp_path: Path) -> None:
    (tmp_path / "users").write_text("ann\nbob\n")
    (tmp_path / "admins").write_text("root\n")
    files = {
        "api_key_file": str(tmp_path / "users"),
        "admin_key_file": str(tmp_path / "admins"),
    }
    engine = FakeEngine(says("Hello"), delay=0.01)
    async with serving(engine, model, **files) as served:  # type: ignore[arg-type]
        async with watching(served, "ann") as ann, watching(served, "root") as root:
            assert (await ann.next("hello"))["role"] == "user"
            assert (await root.next("hello"))["role"] == "admin"
            headers = {"authorization": "Bearer bob", "x-request-id": "secret-of-bob"}
            body = {"prompt": "Hi", "max_tokens": 30, "ignore_eos": True}
            task = asyncio.create_task(
                served.http.post("/v1/completions", json=body, headers=headers)
            )
            seen, all_of_them = await ann.next(), await root.next()
            assert seen["requests"] == seen["kv"] == []
            assert "secret-of-bob" not in json.dumps(seen)
            assert all(step[3] == step[4] == [] for step in seen["steps"])
            assert sum(sum(step[7]) for step in seen["steps"]) > 0
            assert all_of_them["requests"][0][-1] == "secret-of-bob"
            plain = {**UI, "authorization": "Bearer ann"}
            blocks = (await served.http.get("/ui/api/blocks", headers=plain)).json()
            assert blocks["requests"] == []
            await task
        assert (await served.http.get("/ui/api/watch", headers=UI)).status_code == 401


async def test_viewer_is_no_work_and_no_info_line(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with watching(served) as view:
            await view.next("hello")
            health = (await served.http.get("/health")).json()
            assert (health["running"], health["waiting"]) == (0, 0)
            assert not served.engine.busy
            before = await served.metric("http_requests_total")
        live = served.app.state.glassbox.live
        await eventually(lambda: live.num_viewers == 0, "the viewer has left")
    lines = [r for r in caplog.records if "/ui/api/watch" in str(r.msg)]
    assert lines
    assert {line.levelno for line in lines} == {logging.DEBUG}
    assert await served.metric("http_requests_total") == before


async def test_viewer_sees_a_drain_and_leaves_at_its_end(served: Served) -> None:
    served.engine.delay = 0.02
    async with watching(served) as view:
        await view.next("hello")
        task = asyncio.create_task(served.complete(max_tokens=30, ignore_eos=True))
        await view.next()
        served.engine.drain()
        await view.next()
        assert (await view.next("end")) == {"reason": "draining"}
        assert (await task).status_code == 200


async def test_viewer_of_a_dead_engine_gets_the_end(served: Served) -> None:
    async with watching(served) as view:
        await view.next("hello")
        served.engine.die()
        assert (await view.next("end")) == {"reason": "dead"}


async def test_viewer_whose_engine_dies_before_the_first_event_gets_the_end(
    served: Served,
) -> None:
    with mock.patch.object(served.engine, "_send"):  # no Blocks comes
        async with watching(served) as view:
            await eventually(lambda: bool(served.engine.watch_calls), "the blocks are requested")
            served.engine.die()
            assert (await view.next("end")) == {"reason": "dead"}


async def test_viewer_without_blocks_is_never_lost(served: Served) -> None:
    """Its frames are whole pictures, and `penstock top` shows each."""
    async with watching(served, blocks=0) as view:
        await view.next("hello")
        [viewer] = served.app.state.glassbox.live._viewers
        viewer.lose(1.0)
        frame = await view.next()
        assert frame.keys() == {"t", "requests", "queue", "stats"}


async def test_large_frame_becomes_lost(served: Served) -> None:
    with mock.patch("server.glassbox.watch.routes.MOST_BYTES", 100):
        async with watching(served) as view:
            await view.next("hello")
            await served.complete(max_tokens=4)
            assert (await view.next())["lost"] is True


async def test_slow_reader_is_lost_and_then_goes_on(model: Path, says: Any) -> None:
    """A reader that does not read while its buffers fill, and then for MOST_BEHIND_S."""
    engine = FakeEngine(says("Hello"))
    async with serving(engine, model, send_buffer=4096) as served:

        async def traffic() -> None:
            while True:
                await served.complete(max_tokens=300, ignore_eos=True, n=4)

        loop = asyncio.get_running_loop()
        with (
            socket.socket() as reader,
            mock.patch("server.glassbox.watch.viewer.MOST_BEHIND_S", 0.3),
        ):
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.setblocking(False)
            await loop.sock_connect(reader, ("127.0.0.1", served.port))
            request = "GET /ui/api/watch?blocks=1 HTTP/1.1\r\nHost: localhost\r\nX-Penstock-UI: 1"
            await loop.sock_sendall(reader, f"{request}\r\n\r\n".encode())
            live = served.app.state.glassbox.live
            await eventually(lambda: live.map is not None, "the view has begun")
            [viewer] = live._viewers
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(traffic()) for _ in range(4)]
                await eventually(lambda: viewer._lost_at is not None, "the reader is behind")
                for task in tasks:
                    task.cancel()
            text = b""
            async with asyncio.timeout(10):
                while b'"lost":true' not in text:
                    text += await loop.sock_recv(reader, 65536)
        await eventually(lambda: live.num_viewers == 0, "the reader has left")
