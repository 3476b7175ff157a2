"""Run `penstock serve`: load the model, serve, drain, and exit with a status that says why."""

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
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from engine.client.interface import EngineClient
from engine.config import EngineConfig
from engine.device.limits import release_unused
from engine.errors import ConfigError, EngineDeadError
from server import exit_codes
from server.app import create_app
from server.cli.banner import banner, base_url, load_progress
from server.cli.console import logger_for
from server.config import ServerConfig
from server.http.api_keys import keys_of
from server.http.connection import Connection, make_room
from server.http.listener import ACCEPTED_AT_ONCE
from server.state import AppState

KEEP_ALIVE_S = 75  # longer than the 60 s after which common proxies drop an idle connection
DEATH_NOTICE_S = 1.0  # /health reports a dead engine for this long before the process exits
# A second signal within this time is ignored: `timeout` signals its child and its process group.
ECHO_S = 0.2
FULL_NOTICE_S = 10  # least time between two log records that no connection can be accepted
SPARE_FILES = 32  # file descriptors reserved for other files and for connections being closed
LAST_WORDS_S = 1  # time for interrupted streams to send their error event


def run(
    config: ServerConfig, engine_config: EngineConfig, client: EngineClient, listener: socket.socket
) -> int:
    """Serve on an open socket until a signal or the engine's death; return the exit status."""
    try:
        app = create_app(config, engine_config, client)
    except ConfigError as error:
        logger_for(config, "error")(f"penstock: {error}")
        return exit_codes.BAD_CONFIG
    lifetime = Lifetime(app, listener)
    status = run_lifetime(lifetime)
    if lifetime.cause:  # logged last, so that supervisors can read it as the last line
        logger_for(config, "error" if status else "info")(f"penstock: {lifetime.cause}")
    return status


def run_lifetime(lifetime: Lifetime) -> int:
    """Serve until the end; return the exit status."""
    release_unused()  # reading a tokenizer leaves more freed memory than the tokenizer takes
    with asyncio.Runner(loop_factory=lifetime.server.config.get_loop_factory()) as runner:
        return runner.run(lifetime.run())


def max_connections() -> float:
    """Raise the soft limit of open files to the hard limit; return how many connections fit.

    The soft limit is low by default only to protect programs that use select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    try:
        own = len(os.listdir("/dev/fd"))
    except OSError:  # /proc is not mounted
        own = SPARE_FILES
    return soft - own - SPARE_FILES


def uvicorn_config(
    app: FastAPI, keep_alive: float = KEEP_ALIVE_S, most_connections: float = math.inf
) -> uvicorn.Config:
    """Return uvicorn's configuration. `keep_alive` is the idle timeout in seconds."""
    state: AppState = app.state.penstock
    connection = partial(
        Connection,
        metrics=app.state.metrics,
        access_log=state.config.access_log,
        max_connections=most_connections,
    )
    return http_config(app, connection, keep_alive, lifespan="on")


def http_config(
    app: Any, connection: Any, keep_alive: float, *, lifespan: Literal["on", "off"]
) -> uvicorn.Config:
    """Return uvicorn's configuration for an ASGI application; `connection` makes its protocols."""
    return uvicorn.Config(
        app,
        loop="asyncio",  # not uvloop, which does not report that descriptors ran out
        http=connection,  # it makes a protocol, as the class does
        ws="none",
        lifespan=lifespan,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # a float works, too
    )


class Server(uvicorn.Server):
    """uvicorn.Server without its signal handlers, which would skip the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Lifetime:
    """One run of the server. It handles the signals and decides the order of shutdown.

    `announce` runs while the model loads; by default it writes to stderr or the log, as `say` does.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        say: Callable[[str], None] | None = None,
        announce: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.cause = ""  # why the server stops: a signal or the engine's death
        self.server = Server(uvicorn_config(app, most_connections=max_connections()))
        self._app = app
        self._state: AppState = app.state.penstock
        self._keys = keys_of(app)
        self._client = self._state.client
        self._say = say or logger_for(self._state.config)
        self._announce = announce or self._announce_loading
        self._listener = listener
        self._drain: asyncio.Task[None] | None = None
        self._status = exit_codes.CLEAN
        self._signalled_at = -math.inf  # loop time of the first signal
        self._full_logged_at = -math.inf  # loop time of the last record that descriptors ran out

    async def run(self) -> int:
        """Serve until the server stops; return the exit status."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._state.config.api_key_file or self._state.config.admin_key_file:
            loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        tasks = [asyncio.create_task(self._announce()), asyncio.create_task(self._watch())]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            await self.server.serve(sockets=[self._listener])
        except SystemExit:  # uvicorn exits when a lifespan fails, and has logged why
            self._status = exit_codes.CANNOT_LISTEN
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
        """Make room for connections that asyncio failed to accept; log it at most every 10 s.

        asyncio calls this for each failed accept and retries after one second.
        """
        error = context.get("exception")
        if self.server.should_exit and "_start_serving" in repr(context.get("handle")):
            return  # the listening socket was closed before the retry
        if "socket" not in context or not isinstance(error, OSError):
            loop.default_exception_handler(context)
            return
        make_room(self.server.server_state.connections, SPARE_FILES)
        if loop.time() - self._full_logged_at >= FULL_NOTICE_S:
            self._full_logged_at = loop.time()
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger_for(self._state.config, "warning")(
                f"penstock: {error.strerror}: new connections wait until others end or have been "
                f"idle for a second. This process may open {most} files; raise `ulimit -n`."
            )

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            # `run` raises the error. A server without `_watch` would outlive a dead engine.
            self._stop_serving(LAST_WORDS_S)

    async def _announce_loading(self) -> None:
        port = self._listener.getsockname()[1]
        url = base_url(self._state.config.host, port)
        self._say(f"penstock: listening on {url}, loading {self._state.engine_config.model}")
        ready = asyncio.create_task(self._client.wait_ready())
        try:
            with load_progress(self._say) as show:
                while not ready.done():
                    show(self._client.progress)
                    await asyncio.wait({ready}, timeout=0.1)
            # Objects alive by now stay alive. Each full collection would scan them again, which
            # stalled all streams for 25 ms or more.
            gc.freeze()
            with contextlib.suppress(EngineDeadError):  # `_watch` reports it
                self._say(banner(self._app, ready.result(), port))
        finally:
            ready.cancel()

    async def _watch(self) -> None:
        self.cause = str(await self._client.wait_dead())
        if self._client.config_error:
            self._status = exit_codes.BAD_CONFIG
        else:
            self._status = exit_codes.ENGINE_DIED
            await asyncio.sleep(DEATH_NOTICE_S)
        self._stop_serving(LAST_WORDS_S)

    def _reload_keys(self) -> None:
        try:
            self._keys.reload()
        except ConfigError as error:
            text = f"penstock: SIGHUP: the API keys are unchanged: {error}"
            logger_for(self._state.config, "error")(text)
        else:
            self._say(f"penstock: SIGHUP: {len(self._keys)} API keys read")

    def _on_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._drain is not None:
            if now - self._signalled_at < ECHO_S:
                return
            # Skip the clean-up, which could hang. The engine process ends with its parent.
            sys.stderr.flush()
            os._exit(128 + number)
        self._signalled_at = now
        self.cause = self.cause or f"stopped by {number.name}"
        self._drain = asyncio.create_task(self._drain_and_stop(number.name))

    async def _drain_and_stop(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        timeout = self._state.config.drain_timeout
        deadline = loop.time() + timeout
        grace = LAST_WORDS_S
        try:
            self._client.drain()
            if self._unanswered:
                self._say(
                    f"penstock: {name}: finishing accepted requests, at most {timeout:g} s; "
                    "send the signal again to exit at once"
                )
            # Keep the port open: load balancers must read 503 from /ready, not fail to connect.
            while self._unanswered and loop.time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            if self._unanswered:
                # Both run at the same time, and each takes at most a second.
                self._stop_serving(grace)
                await self._client.stop()  # fails the remaining requests with an error
            else:
                grace = max(grace, math.ceil(deadline - loop.time()))
        finally:
            self._stop_serving(grace)

    @property
    def _unanswered(self) -> bool:
        """Whether a request is in the engine, on its way there, or still being answered.

        Viewers of the engine do not count: they see the drain, and leave at its end.
        """
        tasks = len(self.server.server_state.tasks)
        return self._client.busy or tasks > sum(count() for count in self._state.viewer_counts)

    def _stop_serving(self, grace_s: int) -> None:
        self.server.config.timeout_graceful_shutdown = grace_s
        self.server.should_exit = True
