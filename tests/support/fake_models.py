"""Servers of models without an engine, in the event loop of the test, and a parent in front."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.config import EngineConfig
from server.cli.lifetime import Server, http_config
from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from server.http.key_file import read_limited_keys
from server.http.listener import listen
from server.models.catalog import Catalog, ModelSpec
from server.models.client_connection import ClientConnection
from server.models.counts import PoolCounts
from server.models.front import Front
from server.models.pool import LoadError, ModelPool, Need

GIB = 1 << 30


class FakeModel:
    """A server whose answers say what it got. `events` are sent when the test sets `next`."""

    def __init__(self, spec: ModelSpec, folder: Path, number: int) -> None:
        self.spec = spec
        self.socket = str(folder / str(number))
        self.progress = ("reading weights", 0.5)
        self.load_may_end = asyncio.Event()
        self.load_may_end.set()
        self.fails = ""
        self.was_stopped = False
        self.seen: list[dict[str, Any]] = []
        self.num_aborted = 0
        self.server_load = 0
        self.next = asyncio.Semaphore(0)  # each release lets one event go
        self._ended = asyncio.Event()
        routes = [
            Route("/load", self._load),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/api/{list}", self._listed),
            Route("/v1/responses/{id}", self._response, methods=["GET", "DELETE"]),
            Route("/{path:path}", self._any, methods=["GET", "POST", "DELETE"]),
        ]
        # uvicorn's own log_config would change the loggers of all later tests.
        config = uvicorn.Config(
            Starlette(routes=routes), uds=self.socket, log_config=None, lifespan="off"
        )
        self._server = Server(config)
        self._task = asyncio.create_task(self._server.serve())

    async def wait_loaded(self) -> None:
        while not self._server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await self.load_may_end.wait()
        if self.fails:
            raise LoadError(self.fails)

    async def wait_ended(self) -> str:
        await self._ended.wait()
        return "its process was killed by signal 9"

    async def stop(self) -> None:
        self.was_stopped = True
        await self.die()

    async def die(self) -> None:
        """End as by SIGKILL: connections break off."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = True
        for server in getattr(self._server, "servers", []):
            server.close()
        for task in list(self._server.server_state.tasks):
            task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._ended.set()

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self.server_load})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse("# HELP a A.\n# TYPE a counter\na 1.0\n")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": n, "kind": "decoder"} for n in self.spec.names]})

    async def _listed(self, request: Request) -> Response:
        names = self.spec.names
        return JSONResponse({"models": [{"name": n, "context_length": 64} for n in names]})

    async def _response(self, request: Request) -> Response:
        status = 200 if request.path_params["id"] == f"resp_{self.spec.name}" else 404
        return JSONResponse({"made_by": self.spec.name}, status)

    async def _any(self, request: Request) -> Response:
        body = await request.body()
        seen = {
            "model": self.spec.name,
            "method": request.method,
            "path": request.url.path,
            "query": request.url.query,
            "headers": dict(request.headers),
            "body": body.decode(),
        }
        self.seen.append(seen)
        if b'"stream":true' in body:
            return StreamingResponse(self._events(), media_type="text/event-stream")
        return JSONResponse(seen, headers={"x-of-model": "yes"})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for number in range(1000):
                await self.next.acquire()
                yield f"data: {number}\n\n".encode()
        except BaseException:
            self.num_aborted += 1
            raise


class Fleet:
    """The parent's pool over fake models. `models` has all that were started, in order."""

    def __init__(
        self,
        folder: Path,
        *names: str,
        memory: int = 2 * GIB,
        load_timeout: float = 20.0,
        prepare: Callable[[FakeModel], None] = lambda model: None,
        **config: Any,
    ) -> None:
        self.models: list[FakeModel] = []
        self.counts = PoolCounts()
        self.said: list[str] = []
        self.config = ServerConfig(port=0, **config)
        self._folder = folder
        self._prepare = prepare
        self.pool = ModelPool(
            self._plan,
            self._start,
            memory=memory,
            free=memory,
            load_timeout=load_timeout,
            counts=self.counts,
            tell=self.said.append,
        )
        self.counts.watch(self.pool)
        self.catalog = Catalog()
        for name in names:
            self.catalog.add(spec_of(name, self.config))

    async def _plan(self, spec: ModelSpec, memory: int | None) -> Need:
        return Need(3 * GIB if spec.name == "huge" else GIB, 0)

    async def _start(self, spec: ModelSpec, need: Need) -> FakeModel:
        model = FakeModel(spec, self._folder, len(self.models))
        self._prepare(model)
        self.models.append(model)
        return model

    def spec(self, name: str) -> ModelSpec:
        return self.catalog.specs[name]

    def running(self) -> list[str]:
        return sorted(instance.spec.name for instance in self.pool.loaded())

    def count(self, series: str) -> float:
        """Return the sum of the values of a series."""
        lines = self.counts.render().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{series}{{"))


def spec_of(name: str, config: ServerConfig, **more: Any) -> ModelSpec:
    return ModelSpec(name, replace(config), EngineConfig(model=name), **more)


@contextlib.asynccontextmanager
async def served(fleet: Fleet) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a parent that listens on a port."""
    keys = ApiKeys(partial(read_limited_keys, fleet.config))
    front = Front(fleet.config, fleet.catalog, fleet.pool, keys, fleet.counts, 0)
    connection = partial(
        ClientConnection, metrics=fleet.counts, access_log=False, max_connections=math.inf
    )
    listener = listen(fleet.config)
    server = Server(http_config(front.app(), connection, 75, lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx2.AsyncClient(base_url=url, timeout=20) as client:
        yield client
    server.should_exit = True
    await task
    await fleet.pool.close()
