"""The responses of a generation: when it is submitted, and when it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import NOT_FINITE, FakeEngine
from tests.support.rig import serving

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "a", "echo": True},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


class Watch:
    """Records for each submission whether another task ran since the end of its reservation."""

    def __init__(self, engine: FakeEngine, patch: pytest.MonkeyPatch) -> None:
        self.found: list[bool] = []
        self._other_task_ran = False
        patch.setattr(engine, "reserve", self._reserve)
        for name in ("submit", "embed"):
            if hasattr(engine, name):
                patch.setattr(engine, name, self._watched(getattr(engine, name)))

    @contextlib.contextmanager
    def _reserve(self, tenant: str) -> Iterator[None]:
        yield
        self._other_task_ran = False
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._other_task_ran = True

    def _watched(self, submit: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(requests: Any) -> Any:
            self.found.append(self._other_task_ran)
            return submit(requests)

        return watched


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_submission_follows_reservation_before_any_other_task(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Otherwise another request could take the queue place that was reserved for this one."""
    monkeypatch.setattr("server.generation.off_loop.INLINE_CHARS", 0)  # all texts use a thread
    generates = "completions" in path
    engine = FakeEngine(says("x")) if generates else FakeEncoder(lambda request: [])
    watch = Watch(engine, monkeypatch)
    body = REQUESTS[path]
    if generates:
        body = body | {"stream": stream}
    async with serving(engine, model) as served:
        assert (await served.http.post(path, json=body)).status_code == 200
    assert watch.found == [False]


class StalledClient:
    """An ASGI client that stops reading at the first message that contains `stop`."""

    def __init__(self, body: dict[str, Any], stop: bytes) -> None:
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._stop = stop
        self.stalled = asyncio.Event()
        self.release = asyncio.Event()

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        if self._stop in message.get("body", b""):
            self.stalled.set()
            await self.release.wait()


async def test_failed_stream_is_closed_before_its_error_event_is_read(
    model: Any, encode: Any
) -> None:
    """Other choices must not run until a slow client has read the error."""

    def script(request: Any) -> list[int]:
        if request.params.seed == 1:
            return encode("a")
        return [*encode("ab"), NOT_FINITE]

    engine = FakeEngine(script, delay=0.005)
    async with serving(engine, model) as served:
        body = {"prompt": "x", "max_tokens": 400, "n": 2, "seed": 1, "stream": True}
        client = StalledClient(body, stop=b"numerical_error")
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
            "state": {},
        }
        answer = asyncio.create_task(served.app(scope, client.receive, client.send))
        await client.stalled.wait()
        assert engine.aborted == [1]
        assert await served.metric("aborts_total", reason="numerical") == 1
        client.release.set()
        await answer
        assert await served.metric("aborts_total") == 1
        assert not engine.running
