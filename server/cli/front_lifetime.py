"""Run the parent of several models: plan and start their servers, serve, drain, end them all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from engine.checkpoint.folder import model_folder
from engine.client.module_command import python_module
from engine.device.limits import free_memory
from engine.errors import ConfigError
from server import exit_codes
from server.cli.banner import base_url
from server.cli.console import logger_for
from server.cli.lifetime import ECHO_S, KEEP_ALIVE_S, LAST_WORDS_S, Server, http_config
from server.cli.lifetime import max_connections as most_connections
from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from server.http.key_file import read_limited_keys
from server.models.catalog import Catalog, ModelSpec, Options
from server.models.client_connection import ClientConnection
from server.models.control import Start
from server.models.counts import PoolCounts
from server.models.front import Front
from server.models.own import unix_seconds
from server.models.pool import LoadError, ModelPool, ModelServer, Need
from server.models.process import Launcher, ModelProcess

SWEEP_S = 1.0  # between two looks for models to unload by age


def run_front(
    config: ServerConfig, options: Options, catalog: Catalog, listener: socket.socket
) -> int:
    """Serve on an open socket until a signal; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as folder:
        lifetime = FrontLifetime(config, options, catalog, listener, Path(folder))
        with asyncio.Runner() as runner:
            status = runner.run(lifetime.run())
    if lifetime.cause:
        logger_for(config)(f"penstock: {lifetime.cause}")
    return status


async def plan(spec: ModelSpec, memory: int | None) -> Need:
    """Ask for the numbers of `--plan` in a process that may import torch. Raises LoadError."""
    try:
        folder = model_folder(spec.engine.model)
    except ConfigError as error:
        raise LoadError(str(error)) from None
    asked = msgspec.json.encode(replace(spec.engine, model=str(folder))).decode()
    process = await asyncio.create_subprocess_exec(
        *python_module("server.cli.clean_exit"),
        *("engine.offline.plan", asked, "bytes", str(memory or 0)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        raise LoadError(errors.decode(errors="replace").strip().removeprefix("penstock: "))
    total, kv_cache, capacity = msgspec.json.decode(output, type=tuple[int, int, int | None])
    return Need(total, kv_cache, capacity)


class Starter:
    """Starts the server of a model with a socket in `folder`, and the memory that was planned."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self._folder = folder
        self._launcher = launcher
        self._numbers = itertools.count()
        self.processes: list[ModelProcess] = []

    async def start(self, spec: ModelSpec, need: Need) -> ModelServer:
        """Start a process. Raises LoadError."""
        engine = spec.engine
        sizes = (engine.kv_cache_memory_bytes, engine.num_gpu_blocks_override)
        if need.kv_bytes and sizes == (None, None):
            # The plan must hold, however much memory is free when the model loads.
            engine = replace(engine, kv_cache_memory_bytes=need.kv_bytes)
        path = self._folder / f"{next(self._numbers)}"
        process = await self._launcher.start(Start(spec.server, engine, str(path)))
        self.processes = [each for each in self.processes if each.is_running] + [process]
        return process


class FrontLifetime:
    """One run of the parent. It handles the signals and decides the order of shutdown."""

    def __init__(
        self,
        config: ServerConfig,
        options: Options,
        catalog: Catalog,
        listener: socket.socket,
        folder: Path,
    ) -> None:
        self.cause = ""
        self._config = config
        self._listener = listener
        self._say = logger_for(config)
        self._keys = ApiKeys(partial(read_limited_keys, config))
        counts = PoolCounts()
        launcher = Launcher(python_module("server.cli.served_model"), self._use_tokens)
        self._starter = Starter(folder, launcher)
        self._pool = ModelPool(
            plan,
            self._starter.start,
            memory=options.memory,
            free=free_memory(),
            load_timeout=options.load_timeout,
            counts=counts,
            tell=self._say,
        )
        counts.watch(self._pool)
        self._front = Front(config, catalog, self._pool, self._keys, counts, unix_seconds())
        connection = partial(
            ClientConnection,
            metrics=counts,
            access_log=config.access_log,
            max_connections=most_connections(),
        )
        app = self._front.app()
        self._server = Server(http_config(app, connection, KEEP_ALIVE_S, lifespan="off"))
        self._drain: asyncio.Task[None] | None = None
        self._signalled_at = -math.inf  # loop time of the first signal

    def _use_tokens(self, tokens: Mapping[str, int]) -> None:
        for name, count in tokens.items():
            limiter = self._keys.limiter(name)
            if limiter is not None:
                limiter.use_tokens(count)

    async def run(self) -> int:
        """Serve until a signal; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._config.api_key_file or self._config.admin_key_file:
            loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        self._announce()
        for spec in self._front.catalog.specs.values():
            if spec.preload:
                self._pool.preload(spec)
        sweep = asyncio.create_task(self._sweep())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)
            await self._pool.close()
        return exit_codes.CLEAN

    def _announce(self) -> None:
        url = base_url(self._config.host, self._listener.getsockname()[1])
        specs = self._front.catalog.specs
        self._say(
            f"penstock: listening on {url}, {len(specs)} models, each loaded by its first request"
        )
        for spec in specs.values():
            aliases = f", also {', '.join(spec.names[1:])}" if spec.names[1:] else ""
            self._say(f"  {spec.name}{aliases}")
        self._say(f"  API       {url}/v1   metrics {url}/metrics   pages {url}/ui/")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._pool.unload_old(asyncio.get_running_loop().time())

    def _reload_keys(self) -> None:
        try:
            self._keys.reload()
        except ConfigError as error:
            text = f"penstock: SIGHUP: the API keys are unchanged: {error}"
            logger_for(self._config, "error")(text)
            return
        for process in self._starter.processes:
            process.reload_keys()
        self._say(f"penstock: SIGHUP: {len(self._keys)} API keys read")

    def _on_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._drain is not None:
            if now - self._signalled_at < ECHO_S:
                return
            sys.stderr.flush()
            os._exit(128 + number)  # the servers of the models end with this process
        self._signalled_at = now
        self.cause = self.cause or f"stopped by {number.name}"
        self._drain = asyncio.create_task(self._drain_and_stop(number.name))

    async def _drain_and_stop(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.drain_timeout
        self._front.state = "draining"
        if self._pool.num_open:
            self._say(
                f"penstock: {name}: finishing accepted requests, at most "
                f"{self._config.drain_timeout:g} s; send the signal again to exit at once"
            )
        while self._pool.num_open and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._server.config.timeout_graceful_shutdown = LAST_WORDS_S
        self._server.should_exit = True
