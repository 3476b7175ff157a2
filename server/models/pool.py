"""ModelPool: which models are loaded, who uses them, and which one leaves for another.

A model that leaves has no open request. A model that needs room takes that of the least recently
used one; if all are in use, new requests of the one that was loaded first wait until it is free.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from server.http.errors import ApiError
from server.models.catalog import ModelSpec
from server.models.counts import PoolCounts, Reason
from server.models.upstream import ConnectionLost, Upstream

HOLD_AFTER_S = 1.0  # a model waits this long for an unused one before requests of another are held
LOOK_S = 0.25  # between two looks for a model that may leave
RETRY_S = 5.0  # after a model failed to load, requests are refused for this long
FIRST_LOAD_S = 10.0  # assumed for a model that has not been loaded yet
LONGEST_RETRY_S = 119  # in Retry-After: agents give up on a longer one

State = Literal["waiting", "loading", "loaded", "stopping"]


class LoadError(Exception):
    """A model cannot be loaded. The text is for the log: it may have paths."""


class NobodyWaits(Exception):
    """All requests for a model have left before there was memory for it."""


@dataclass(frozen=True)
class Need:
    """The memory of a model in bytes, by the numbers of --plan."""

    num_bytes: int
    kv_bytes: int  # the part that is KV cache
    capacity: int | None = None  # of the GPU; None: the machine's memory is used


class ModelServer(Protocol):
    """The process that serves one model."""

    socket: str  # path of its Unix socket
    progress: tuple[str, float]  # stage of loading, and the fraction done

    async def wait_loaded(self) -> None:
        """Wait until requests are accepted. Raises LoadError."""

    async def wait_ended(self) -> str:
        """Wait until the process has ended; return how."""

    async def stop(self) -> None:
        """End the process and wait for its end; at last by SIGKILL."""


Plan = Callable[[ModelSpec, int | None], Awaitable[Need]]
Start = Callable[[ModelSpec, Need], Awaitable[ModelServer]]
Tell = Callable[[str], None]


@dataclass(eq=False)
class Instance:
    """One run of a model's server, from the first request for it to its end."""

    spec: ModelSpec
    ready: asyncio.Future[None]
    state: State = "waiting"
    leases: int = 0  # requests that wait for it or are open
    leaves: bool = False  # it is unloaded at the end of its requests
    last_used: float = 0.0  # loop time
    loaded_at: float = 0.0  # loop time
    num_bytes: int = 0  # reserved
    server: ModelServer | None = None
    upstream: Upstream | None = None
    is_open: asyncio.Event = field(default_factory=asyncio.Event)  # new requests need not wait

    @property
    def progress(self) -> tuple[str, float]:
        """The stage of loading, and the fraction done."""
        if self.server is None:
            return "waiting for memory", 0.0
        return self.server.progress


class ModelPool:
    """Starts and ends the servers of models. Used in one event loop."""

    def __init__(
        self,
        plan: Plan,
        start: Start,
        *,
        memory: int | None,
        free: int,
        load_timeout: float,
        counts: PoolCounts,
        tell: Tell,
    ) -> None:
        """`memory` is --memory; `free` is used in its place on a CPU. Both are in bytes."""
        self._plan, self._start = plan, start
        self._memory, self._free = memory, free
        self.load_timeout = load_timeout
        self._counts = counts
        self._tell = tell
        self.instances: dict[str, Instance] = {}  # by name of the model; those that may be leased
        self._running: set[Instance] = set()  # those that hold memory
        self._needs: dict[str, Need] = {}
        self._load_seconds: dict[str, float] = {}  # of the last load
        self._failed_until: dict[str, float] = {}
        self._room = asyncio.Lock()  # models get memory in the order of their requests
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    @property
    def used(self) -> int:
        """Bytes that running models have reserved."""
        return sum(instance.num_bytes for instance in self._running)

    @property
    def num_open(self) -> int:
        """Requests that wait for a model or are open."""
        return sum(i.leases for i in {*self.instances.values(), *self._running})

    def loaded(self) -> list[Instance]:
        return [each for each in self.instances.values() if each.state == "loaded"]

    # Requests.

    async def lease(self, spec: ModelSpec) -> Instance:
        """Return the loaded model for one request; `release` ends that.

        Raises a 503 ApiError if the model cannot be loaded, or not within `load_timeout` seconds.
        """
        try:
            async with asyncio.timeout(self.load_timeout):
                return await self._lease(spec)
        except TimeoutError:
            raise self._too_late(spec) from None

    async def _lease(self, spec: ModelSpec) -> Instance:
        instance = self._find(spec)
        while not instance.is_open.is_set():
            await instance.is_open.wait()
            instance = self._find(spec)
        instance.leases += 1
        try:
            await asyncio.shield(instance.ready)
        except BaseException:
            self.release(instance)
            raise
        return instance

    def _find(self, spec: ModelSpec) -> Instance:
        """Return the instance of a model. It begins to load if it does not run."""
        if (instance := self.instances.get(spec.name)) is not None:
            return instance
        now = asyncio.get_running_loop().time()
        if self.is_closed or now < self._failed_until.get(spec.name, -math.inf):
            raise _not_loaded(spec)
        instance = Instance(spec, asyncio.get_running_loop().create_future())
        instance.ready.add_done_callback(lambda future: future.exception())  # seen
        instance.is_open.set()
        self.instances[spec.name] = instance
        self._spawn(self._load(instance))
        return instance

    def release(self, instance: Instance) -> None:
        """End what `lease` began."""
        instance.leases -= 1
        instance.last_used = asyncio.get_running_loop().time()
        if instance.leases == 0:
            self._changed.set()
            if instance.leaves and instance.state == "loaded" and not self.is_closed:
                self._spawn(self._leave(instance))

    def _too_late(self, spec: ModelSpec) -> ApiError:
        seconds = self._load_seconds.get(spec.name, FIRST_LOAD_S)
        text = (
            f"{spec.name} was not loaded within {self.load_timeout:g} s (--load-timeout); loading "
            f"takes about {math.ceil(seconds)} s once the memory is free. Retry later."
        )
        retry = min(max(math.ceil(seconds), 1), LONGEST_RETRY_S)
        return ApiError(503, "model_loading", text, headers={"retry-after": str(retry)})

    # Loading.

    async def _load(self, instance: Instance) -> None:
        name = instance.spec.name
        try:
            need = await self._need(instance.spec)
            await self._reserve(instance, need)
            began = asyncio.get_running_loop().time()
            instance.state = "loading"
            self._tell(f"penstock: loading {name}")
            instance.server = await self._start(instance.spec, need)
            await instance.server.wait_loaded()
        except LoadError as error:
            self._tell(f"penstock: {name} was not loaded: {error}")
            self._counts.failed(name)
            self._failed_until[name] = asyncio.get_running_loop().time() + RETRY_S
            await self._give_up(instance, _not_loaded(instance.spec))
            return
        except NobodyWaits:
            await self._give_up(instance, _not_loaded(instance.spec))
            return
        except BaseException:
            await self._give_up(instance, _not_loaded(instance.spec))
            raise
        now = asyncio.get_running_loop().time()
        self._load_seconds[name] = now - began
        self._counts.loaded(name, now - began)
        self._tell(f"penstock: {name} is loaded, in {now - began:.1f} s")
        instance.upstream = Upstream(instance.server.socket)
        instance.loaded_at = instance.last_used = now
        instance.state = "loaded"
        instance.ready.set_result(None)
        self._changed.set()
        self._spawn(self._watch(instance, instance.server))

    async def _give_up(self, instance: Instance, error: Exception) -> None:
        """End the load of a model; requests that wait for it fail with `error`."""
        self._detach(instance)
        if not instance.ready.done():
            instance.ready.set_exception(error)
        if instance.server is not None:
            await asyncio.shield(instance.server.stop())
        self._give_back(instance)

    async def _need(self, spec: ModelSpec) -> Need:
        """Return the memory of a model. It is planned once, as if all of --memory were free."""
        if spec.name not in self._needs:
            self._needs[spec.name] = await self._plan(spec, self._memory)
        return self._needs[spec.name]

    def _budget(self, need: Need) -> int:
        return self._memory or need.capacity or self._free

    async def _reserve(self, instance: Instance, need: Need) -> None:
        """Reserve the memory of a model; others leave for it. Raises LoadError."""
        budget = self._budget(need)
        if need.num_bytes > budget:
            raise LoadError(
                f"it needs {need.num_bytes} bytes by --plan, but all models together may take "
                f"{budget} (--memory). Lower its max-model-len or kv-cache-memory-bytes."
            )
        async with self._room:
            hold_at = asyncio.get_running_loop().time() + HOLD_AFTER_S
            held: set[Instance] = set()
            try:
                while self.used + need.num_bytes > budget:
                    if instance.leases == 0:
                        raise NobodyWaits
                    await self._make_room(held, hold_at)
            finally:
                for each in held:
                    each.is_open.set()
            instance.num_bytes = need.num_bytes
            self._running.add(instance)

    async def _make_room(self, held: set[Instance], hold_at: float) -> None:
        """Unload an unused model, or wait a moment for one."""
        self._changed.clear()
        unused = sorted((i for i in self.loaded() if i.leases == 0), key=lambda i: i.last_used)
        for victim in unused:
            if await self._unload_if_unused(victim, "memory"):
                return
        if not held and asyncio.get_running_loop().time() >= hold_at and self.loaded():
            first = min(self.loaded(), key=lambda i: i.loaded_at)
            first.is_open.clear()
            held.add(first)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()

    # Unloading.

    async def unload(self, spec: ModelSpec) -> None:
        """Unload a model if it is loaded, at the end of its open requests."""
        instance = self.instances.get(spec.name)
        if instance is None:
            return
        instance.leaves = True
        if instance.state == "loaded" and instance.leases == 0:
            await self._leave(instance)

    async def _leave(self, instance: Instance) -> None:
        await self._unload_if_unused(instance, "request")

    async def _unload_if_unused(self, instance: Instance, reason: Reason) -> bool:
        """End the server of a model without requests. Return whether it had none."""
        if await _runs_batch(instance) or instance.leases or instance.state != "loaded":
            return False
        self._tell(f"penstock: unloading {instance.spec.name} ({reason})")
        await self._stop(instance)
        self._counts.unloaded(instance.spec.name, reason)
        return True

    async def _stop(self, instance: Instance) -> None:
        instance.state = "stopping"
        self._detach(instance)
        assert instance.server is not None
        await asyncio.shield(instance.server.stop())
        self._give_back(instance)

    def _detach(self, instance: Instance) -> None:
        """Let the next request for the model start another server."""
        if self.instances.get(instance.spec.name) is instance:
            del self.instances[instance.spec.name]
        instance.is_open.set()
        if instance.upstream is not None:
            instance.upstream.close()

    def _give_back(self, instance: Instance) -> None:
        self._running.discard(instance)
        self._changed.set()

    async def unload_old(self, now: float) -> None:
        """Unload the models that have had no request for their `keep_alive` seconds."""
        for instance in self.loaded():
            age = now - instance.last_used
            keep = instance.spec.keep_alive
            if keep is not None and age >= keep and not instance.leases:
                await self._unload_if_unused(instance, "age")

    async def _watch(self, instance: Instance, server: ModelServer) -> None:
        """Notice that a server has ended by itself."""
        how = await server.wait_ended()
        if instance.state == "loaded" and not self.is_closed:
            instance.state = "stopping"
            self._detach(instance)
            self._give_back(instance)
            self._counts.crashed(instance.spec.name)
            self._tell(
                f"penstock: {instance.spec.name} has ended: {how}; the next request loads it"
            )

    # Life.

    def preload(self, spec: ModelSpec) -> None:
        """Load a model without a request."""

        async def load() -> None:
            with suppress(ApiError):
                self.release(await self.lease(spec))

        self._spawn(load())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all servers."""
        self.is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*[self._stop(i) for i in list(self._running) if i.server is not None])


def _not_loaded(spec: ModelSpec) -> ApiError:
    text = f"{spec.name} could not be loaded; the server's log has the cause."
    retry = {"retry-after": str(math.ceil(RETRY_S))}
    return ApiError(503, "model_not_loaded", text, headers=retry)


async def _runs_batch(instance: Instance) -> bool:
    """Whether the server of a model still computes, for a batch; it has no open request."""
    assert instance.upstream is not None
    try:
        return await instance.upstream.get("/load") != b'{"server_load":0}'
    except ConnectionLost:
        return False
