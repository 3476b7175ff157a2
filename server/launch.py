"""The life of `penstock serve`: load, serve, drain, leave with a status that tells why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError
from server import exits
from server.app import create_app
from server.banner import banner, base_url, load_progress
from server.config import ServerConfig
from server.connection import MAX_HEAD_BYTES, Connection, make_room
from server.service import Service
from server.voice import voice

KEEP_ALIVE_S = 75  # above the 60 s after which common proxies drop an idle connection
DEATH_NOTICE_S = 1.0  # how long /health tells of a dead engine before the process ends
ECHO_S = 0.2  # within which a signal is the first one again: `timeout` sends it to its group, too
FULL_NOTICE_S = 10  # between two records that no more connections can be accepted
SPARE_FILES = 32  # for whatever else is opened, and for connections that are being closed
LAST_WORDS_S = 1  # for streams that were cut off to send their error event


def run(
    config: ServerConfig, engine_config: EngineConfig, client: EngineClient, listener: socket.socket
) -> int:
    """Serves on an open socket until a signal or the engine's death; returns the exit status."""
    try:
        app = create_app(config, engine_config, client)
    except ConfigError as error:
        voice(config, "error")(f"penstock: {error}")
        return exits.BAD_CONFIG
    app.state.most_connections = _most_connections()
    lifetime = Lifetime(app, engine_config, listener)
    with asyncio.Runner(loop_factory=lifetime.server.config.get_loop_factory()) as runner:
        status = runner.run(lifetime.run())
    if lifetime.cause:  # after everything else, so that it is the last line
        voice(config, "error" if status else "info")(f"penstock: {lifetime.cause}")
    return status


def _most_connections() -> float:
    """Raises the soft limit of open files, which is low for the sake of programs that use select,
    to the hard one. Returns how many connections that leaves room for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    try:
        own = len(os.listdir("/dev/fd"))
    except OSError:  # without /proc
        own = SPARE_FILES
    return soft - own - SPARE_FILES


def uvicorn_config(app: Any, keep_alive: float = KEEP_ALIVE_S) -> uvicorn.Config:
    """How the server speaks HTTP; `keep_alive` in seconds."""
    return uvicorn.Config(
        app,
        loop="asyncio",  # not uvloop where that happens to be installed
        http=Connection,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=1,  # see Listener
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # any number will do
    )


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: here a drain comes before the exit."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Lifetime:
    """One run of the server. Owns the signals and the order in which things end."""

    def __init__(self, app: FastAPI, engine_config: EngineConfig, listener: socket.socket) -> None:
        self.cause = ""  # why it all ended: a signal, or the engine's own end
        self.server = Server(uvicorn_config(app))
        self._service: Service = app.state.service
        self._client = self._service.client
        self._say = voice(self._service.config)
        self._engine_config = engine_config
        self._listener = listener
        self._port: int = listener.getsockname()[1]
        self._drain: asyncio.Task[None] | None = None
        self._status = exits.CLEAN
        self._told_to_leave = -math.inf  # when, by the loop's clock, like the next
        self._full_told = -math.inf

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._service.config.api_key_file:
            loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        url = base_url(self._service.config.host, self._port)
        self._say(f"penstock: listening on {url}, loading {self._engine_config.model}")
        tasks = [asyncio.create_task(self._announce()), asyncio.create_task(self._watch())]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            await self.server.serve(sockets=[self._listener])
        except SystemExit:  # uvicorn's answer to a lifespan that failed; it has logged why
            self._status = exits.CANNOT_LISTEN
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.stop()
        for error in ended:
            if isinstance(error, Exception):
                raise error
        return self._status

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio tells of each connection it cannot accept, and tries again after a second."""
        error = context.get("exception")
        if self.server.should_exit and "_start_serving" in repr(context.get("handle")):
            return  # the socket was closed in that second
        if "socket" not in context or not isinstance(error, OSError):
            loop.default_exception_handler(context)
            return
        make_room(self.server.server_state.connections, SPARE_FILES)
        if loop.time() - self._full_told >= FULL_NOTICE_S:
            self._full_told = loop.time()
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            voice(self._service.config, "warning")(
                "penstock: new connections wait until others end or have been idle for a second: "
                f"{error.strerror}. The limit of this process is {most} (ulimit -n)."
            )

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._stop_serving(LAST_WORDS_S)  # `run` raises it: a server without a watch would lie

    async def _announce(self) -> None:
        ready = asyncio.create_task(self._client.wait_ready())
        try:
            with load_progress(self._say) as show:
                while not ready.done():
                    show(self._client.progress)
                    await asyncio.wait({ready}, timeout=0.1)
            # What lives by now stays: to look through it again took the collector 25 ms and more,
            # in which no stream went on.
            gc.freeze()
            with contextlib.suppress(EngineDeadError):  # `_watch` tells of it
                self._say(banner(self._service, self._engine_config, ready.result(), self._port))
        finally:
            ready.cancel()

    async def _watch(self) -> None:
        self.cause = str(await self._client.wait_dead())
        if self._client.config_error:
            self._status = exits.BAD_CONFIG
        else:
            self._status = exits.ENGINE_DIED
            await asyncio.sleep(DEATH_NOTICE_S)
        self._stop_serving(LAST_WORDS_S)

    def _reload_keys(self) -> None:
        try:
            self._service.keys.reload()
        except ConfigError as error:
            text = f"penstock: SIGHUP: the API keys stay as they were: {error}"
            voice(self._service.config, "error")(text)
        else:
            self._say(f"penstock: SIGHUP: {len(self._service.keys)} API keys read")

    def _on_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._drain is not None:
            if now - self._told_to_leave < ECHO_S:
                return
            # No clean-up: it could wait for what hangs. The engine ends with its parent.
            sys.stderr.flush()
            os._exit(128 + number)
        self._told_to_leave = now
        self.cause = self.cause or f"stopped by {number.name}"
        self._drain = asyncio.create_task(self._drain_and_stop(number.name))

    async def _drain_and_stop(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        timeout = self._service.config.drain_timeout
        deadline = loop.time() + timeout
        grace = LAST_WORDS_S
        try:
            self._client.drain()
            if self._unanswered:
                self._say(
                    f"penstock: {name}: finishing accepted requests, at most {timeout:g} s; "
                    "once more to leave at once"
                )
            # The port stays open meanwhile: load balancers read 503 from /ready, not a refusal.
            while self._unanswered and loop.time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            if self._unanswered:
                self._stop_serving(grace)  # while the engine ends: each takes a second at most
                await self._client.stop()  # fails what is left: its streams end with an error
            else:
                grace = max(grace, math.ceil(deadline - loop.time()))
        finally:
            self._stop_serving(grace)

    @property
    def _unanswered(self) -> bool:
        """Whether a request is open: in the engine, on its way there, or being written."""
        return self._client.busy or bool(self.server.server_state.tasks)

    def _stop_serving(self, grace_s: int) -> None:
        self.server.config.timeout_graceful_shutdown = grace_s
        self.server.should_exit = True
