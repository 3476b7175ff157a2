"""`penstock serve` with a fake engine: `python fake_serve.py '{"port": 0, ...}'`.

test_launch.py starts it as a separate process to test signals and exit statuses. The keys of the
JSON are the fields of Plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Literal

import msgspec
from fake_engine import INFO, FakeEngine

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.protocol.ready import Progress, Ready
from server.cli.clean_exit import standard_streams
from server.cli.lifetime import run
from server.config import ServerConfig
from server.http.listener import listen


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of the engine (times in seconds) and configuration of the server."""

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    log_format: Literal["auto", "json"] = "auto"
    drain_timeout: float = 30.0
    load_s: float = 0.0
    token_s: float = 0.0
    fatal: str = ""  # the engine dies of this after `dies_after_s`; empty: it lives
    dies_after_s: float = 0.0
    config_error: bool = False


class PlannedEngine(FakeEngine):
    """An engine that loads and dies as planned. Its only token is the letter A."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(lambda request: [65], state="loading", info=None, delay=plan.token_s)
        self.plan = plan
        self.progress = Progress("reading weights", 0.0)
        self.config_error = plan.config_error
        self._future: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await super().start()
        self._future = [asyncio.create_task(self._load()), asyncio.create_task(self._end())]

    async def _load(self) -> None:
        await asyncio.sleep(self.plan.load_s)
        self.state, self.info = "ready", INFO
        self.loaded.set()

    async def _end(self) -> None:
        await asyncio.sleep(self.plan.dies_after_s)
        if self.plan.fatal:
            self.die(self.plan.fatal)

    async def wait_ready(self) -> Ready:
        loaded = asyncio.create_task(super().wait_ready())
        awaited = {loaded, self._future[1]} if self.plan.fatal else {loaded}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        loaded.cancel()
        if self.death is not None:
            raise self.death
        return INFO

    async def stop(self) -> None:
        for running in self.running.values():
            running.stream.fail(EngineDeadError("The server has shut down."))
        self.running.clear()
        for task in self._future:
            task.cancel()
        await super().stop()


def main() -> int:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    config = ServerConfig(
        host=plan.host,
        port=plan.port,
        api_key=plan.api_key,
        api_key_file=plan.api_key_file,
        log_format=plan.log_format,
        drain_timeout=plan.drain_timeout,
    )
    with standard_streams(), contextlib.closing(listen(config)) as listener:
        return run(config, EngineConfig(model=plan.model), PlannedEngine(plan), listener)


if __name__ == "__main__":
    sys.exit(main())
