"""Replica: our FastAPI app and its engine, as one process tree under a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Message, Scope

from engine.client.client import ProcessClient
from engine.config import EngineConfig
from server.app import create_app
from server.cli import exit_codes as exits
from server.cli.config import ServerConfig
from server.cli.console import say
from server.lifetime import LAST_WORDS_S
from server.state import Service

LEAVE_S = 5.0  # for the app to end a request whose client has gone


class Replica:
    """Answers ASGI requests. Its engine starts with it and ends with it, and where the engine dies
    the process ends too: Ray starts another one."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: ServerConfig, engine_config: EngineConfig
    ) -> None:
        self._client = ProcessClient(engine_config)
        self._app = create_app(config, engine_config, self._client)
        self._service: Service = self._app.state.service
        self._open = 0
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await self._client.wait_ready()
        self._watch = asyncio.create_task(self._leave_with_engine())

    async def answer(
        self, scope: Scope, body: bytes, prefix: list[bytes]
    ) -> AsyncIterator[list[Message]]:
        """What the app sends, in batches of what has come. `prefix` is for the router."""
        call = Call(body)
        app = asyncio.create_task(self._app(scope, call.receive, call.send))
        app.add_done_callback(call.end)
        self._open += 1
        try:
            async for batch in call.batches():
                yield batch
        finally:
            # Told of the client's end, not cancelled: then the request counts as a disconnect.
            call.gone.set()
            await asyncio.wait({app}, timeout=LEAVE_S)
            app.cancel()
            self._open -= 1

    async def scrape(self, scope: Scope) -> tuple[int, list[Message]]:
        """Our rank among the replicas, which a successor takes over, and the app's whole answer:
        it is the app that knows who may read /metrics."""
        messages = [message async for batch in self.answer(scope, b"", []) for message in batch]
        return serve.get_replica_context().rank.rank, messages

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscaling.scale_on_queue` decides by, asked every few seconds."""
        stats = self._client.stats
        rows = self._service.loaded().max_num_seqs
        return {"waiting": stats.waiting, "running": stats.running, "rows": rows}

    async def _leave_with_engine(self) -> None:
        cause = await self._client.wait_dead()
        say(f"penstock: {cause}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):  # for open streams to send their error event
                while self._open:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        os._exit(exits.ENGINE_DIED)

    async def __del__(self) -> None:  # Ray awaits it, after the requests that were open
        self._watch.cancel()
        await self._lifespan.__aexit__(None, None, None)


class Call:
    """One request as the app sees it: the body, then silence until the client has gone."""

    def __init__(self, body: bytes) -> None:
        self.gone = asyncio.Event()
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._sent: list[Message] = []
        self._wake = asyncio.Event()
        self._ended = False

    async def receive(self) -> Message:
        request, self._request = self._request, None
        if request is not None:
            return request
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._sent.append(message)
        self._wake.set()

    def end(self, app: asyncio.Task[Any]) -> None:
        self._ended = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[Message]]:
        while True:
            if self._sent:
                batch, self._sent = self._sent, []
                yield batch
            elif self._ended:
                return
            else:
                self._wake.clear()
                await self._wake.wait()
