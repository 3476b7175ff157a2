"""Run the FastAPI app of `penstock serve` and its engine under one Ray actor."""

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
from server import exit_codes
from server.app import create_app
from server.cli.console import say
from server.cli.lifetime import LAST_WORDS_S
from server.config import ServerConfig
from server.state import AppState

EXIT_S = 5.0  # time for the app to end a request after its client disconnected


class Replica:
    """Answers ASGI requests with an engine that starts and ends with it.

    If the engine dies, the process exits, and Ray starts another replica.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: ServerConfig, engine_config: EngineConfig
    ) -> None:
        self._client = ProcessClient(engine_config)
        self._app = create_app(config, engine_config, self._client)
        self._state: AppState = self._app.state.penstock
        self._open = 0
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await self._client.wait_ready()
        self._watch = asyncio.create_task(self._leave_with_engine())

    async def answer(
        self, scope: Scope, body: bytes, prefix: list[bytes]
    ) -> AsyncIterator[list[Message]]:
        """Yield the app's messages in batches of those ready. Only the router uses `prefix`."""
        call = Call(body)
        app = asyncio.create_task(self._app(scope, call.receive, call.send))
        app.add_done_callback(call.end)
        self._open += 1
        try:
            async for batch in call.batches():
                yield batch
        finally:
            # Signal the disconnect before cancelling, so that the app counts it as one.
            call.gone.set()
            await asyncio.wait({app}, timeout=EXIT_S)
            app.cancel()
            self._open -= 1

    async def scrape(self, scope: Scope) -> tuple[int, list[Message]]:
        """Return this replica's rank, which its successor takes over, and the app's whole answer.

        The app answers, because it checks the API key for /metrics.
        """
        messages = [message async for batch in self.answer(scope, b"", []) for message in batch]
        return serve.get_replica_context().rank.rank, messages

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the input of `autoscaling.scale_on_queue`. Ray calls it every few seconds."""
        stats = self._client.stats
        rows = self._state.loaded().max_num_seqs
        return {"waiting": stats.waiting, "running": stats.running, "rows": rows}

    async def _leave_with_engine(self) -> None:
        cause = await self._client.wait_dead()
        say(f"penstock: {cause}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):  # lets open streams send their error event
                while self._open:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        os._exit(exit_codes.ENGINE_DIED)

    async def __del__(self) -> None:  # Ray awaits it after the open requests
        self._watch.cancel()
        await self._lifespan.__aexit__(None, None, None)


class Call:
    """One request for the app: its body, then a disconnect once `gone` is set."""

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
