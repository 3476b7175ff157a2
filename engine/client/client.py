"""ProcessClient: the EngineClient over a child process.

It rejects requests when the queue is full,
routes outputs to one `OutputStream` per submission, and notices at once when the child ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from engine.client.admission import AdmissionControl
from engine.client.inspection import WaitListener, WatchListener
from engine.client.interface import State
from engine.client.observation import Observation
from engine.client.output_stream import OutputStream
from engine.client.subprocess import EngineProcess, exit_message
from engine.config import EngineConfig
from engine.errors import (
    EngineDeadError,
    EngineUnavailableError,
    RequestRejectedError,
)
from engine.protocol.adapters import AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.protocol.embed import EmbedOutput, EmbedRequest
from engine.protocol.failure import Fatal, Notice, RemoteTraceback
from engine.protocol.generate import Abort, CacheLookup, Explained, GenerateRequest, Image
from engine.protocol.lens import LensRequest, LensResult
from engine.protocol.outputs import EngineStats, Rejected, StepOutputs, TokenOutput
from engine.protocol.ready import DUMP_STACKS, Progress, Ready, Shutdown
from engine.protocol.watch import Blocks, MeasureWaits, StepTrace, StepWaits, Watch
from engine.protocol.wire import FromEngine, ToEngine

log = logging.getLogger(__name__)
POLL_S = 0.5  # seconds between hang checks
LAST_WORDS_S = 0.5  # seconds for a hung engine to write its stacks before it is killed
EXIT_S = 1.0  # seconds for an engine to exit after Shutdown before it is killed
Request = GenerateRequest | EmbedRequest


class ProcessClient:
    """EngineClient over a child process (`python -m engine.process`): the given `child` if it was
    started earlier, otherwise a new one."""

    def __init__(self, config: EngineConfig, child: EngineProcess | None = None) -> None:
        self.config = config
        self.state: State = "loading"
        self.info: Ready | None = None
        self.progress = Progress("starting", 0.0)
        self._stats = EngineStats()
        self.step_listeners: list[Callable[[StepOutputs], None]] = []
        self.config_error = False
        self._streams: dict[int, OutputStream[Any]] = {}
        # By message id: the answers to CacheLookup, LensRequest and LoadAdapter messages.
        self._lookups: dict[int, asyncio.Future[Any]] = {}
        self._observation = Observation()
        self._queue = AdmissionControl(config)
        self._ids = 0
        self._last_sign = time.monotonic()
        self._num_sent = self._num_handled = 0  # messages to the engine
        self._fatal: str | None = None
        self._child = child
        self._hang_watch: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._dead = asyncio.Event()
        self._death: EngineDeadError | None = None

    @property
    def stats(self) -> EngineStats:
        return replace(self._stats, waiting=max(self._stats.waiting, self._queue.requests))

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._child is None:
            self._child = EngineProcess(self.config)
        self._endpoint = self._child.endpoint
        self._endpoint.listen(self._on_message)
        threading.Thread(target=self._watch, args=(self._child,), daemon=True).start()
        self._hang_watch = asyncio.create_task(self._watch_for_hang())

    def _watch(self, child: EngineProcess) -> None:
        code = child.wait()
        with contextlib.suppress(RuntimeError):  # the loop may have closed first
            self._loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        if self._death is not None:
            return
        # With a status above 0 the engine has sent Fatal. It may also have done so before a signal:
        # after a GPU failure it aborts. The message can arrive later than the news of its end.
        wait_s = 1.0 if code > 0 else 0.1
        while self._fatal is None and self._endpoint.receive(wait_s):
            pass
        self._end(EngineDeadError(self._fatal or exit_message(code)))

    async def _watch_for_hang(self) -> None:
        """End an engine that has work and sends nothing for `stall_timeout` seconds. It counts loop
        turns, not time: Ctrl-Z or a paused container stops this process and the engine together."""
        most = self.config.stall_timeout
        silent, sign = 0.0, self._last_sign
        while silent <= most:
            await asyncio.sleep(POLL_S)
            silent = silent + POLL_S if self._waits and sign == self._last_sign else 0.0
            sign = self._last_sign
        if self._death is None and self._child is not None:
            text = (
                f"The engine hung: it had work but sent nothing for {most:g} s (--stall-timeout). "
                "Raise --stall-timeout if single steps take that long."
            )
            self._child.process.send_signal(DUMP_STACKS)
            self._loop.call_later(LAST_WORDS_S, self._child.process.kill)
            self._end(EngineDeadError(text))

    @property
    def _waits(self) -> bool:
        """Whether the engine must still send something.

        It must also confirm messages without an answer: the abort of a client that gave up is the
        last sign of work that a hung engine has.
        """
        is_confirmed = self._num_handled >= self._num_sent
        return bool(self._streams or self._lookups or self._observation.awaited or not is_confirmed)

    def _begin_to_wait(self) -> None:
        if not self._waits:
            self._last_sign = time.monotonic()  # an idle engine sends nothing

    def _send(self, message: ToEngine) -> None:
        self._begin_to_wait()
        self._endpoint.send(message)
        self._num_sent += 1

    def _end(self, death: EngineDeadError) -> None:
        """Handle the death of an engine that was not shut down."""
        self._fail(death)
        self.state = "dead"
        self._dead.set()
        self._ready.set()
        if self._child is not None:
            self._child.close()

    def _fail(self, death: EngineDeadError) -> None:
        self._death = death
        for stream in set(self._streams.values()):
            stream.fail(death)
        for lookup in self._lookups.values():
            if not lookup.done():
                lookup.set_exception(death)
        self._observation.fail(death)
        self._streams.clear()
        self._queue.clear()

    def _on_message(self, message: FromEngine) -> None:
        self._last_sign = time.monotonic()
        match message:
            case StepOutputs() if self._fatal is None:  # otherwise a message before it may be lost
                self._on_step(message)
            case Explained():
                self._on_explained(message)
            case StepTrace() | Blocks() | StepWaits():
                self._observation.take(message)
            case Progress():
                self.progress = message
            case Ready():
                self._on_message(Progress("ready", 1.0))
                self.info = message
                if self.state == "loading":
                    self.state = "ready"
                self._ready.set()
            case Rejected():
                self._queue.forget([message.id])
                if stream := self._streams.pop(message.id, None):
                    stream.fail(RequestRejectedError(message.code, message.message, message.param))
            case LensResult():
                self._answered(message.id, message)
            case AdapterLoaded():
                self._answered(message.id, message.problem)
            case Notice():
                log.log(message.level, "%s", message.text)
            case Fatal():
                self._fatal = message.message
                self.config_error = message.config_error
                if message.detail:  # for the log only; users get the message alone
                    log.error("the engine failed", exc_info=RemoteTraceback(message.detail))
                if self._child is not None:
                    # Needed if channel.py created the message: the engine then still runs.
                    self._child.process.kill()

    def _on_step(self, outputs: StepOutputs) -> None:
        self._stats = outputs.stats
        self._num_handled = outputs.num_handled
        self._queue.admitted((a.id for a in outputs.admitted), outputs.at)
        for admission in outputs.admitted:
            if stream := self._streams.get(admission.id):
                stream.admissions[admission.id] = admission
        for prefill in outputs.prefills:
            if stream := self._streams.get(prefill.id):
                begin = outputs.at - outputs.stats.step_seconds
                stream.add_prefill(begin, outputs.at, prefill)
        for lookup_id, cached_tokens in outputs.lookups.items():
            self._answered(lookup_id, cached_tokens)
        for output in outputs.tokens:
            self._deliver(outputs.at, output)
        for vector in outputs.embeddings:
            self._deliver(outputs.at, vector)
        for listen in self.step_listeners:
            listen(outputs)

    def _on_explained(self, message: Explained) -> None:
        stream = self._streams.get(message.id)
        if stream is not None:
            if stream.explained is None:
                stream.explained = {}
            stream.explained[message.index] = message  # again after a preemption

    def _answered(self, lookup_id: int, answer: int | str | LensResult) -> None:
        lookup = self._lookups.get(lookup_id)
        if lookup is not None and not lookup.done():
            lookup.set_result(answer)

    def _deliver(self, at: float, output: TokenOutput | EmbedOutput) -> None:
        if stream := self._streams.get(output.id):
            stream.deliver(at, output)
            if output.finish is not None:
                del self._streams[output.id]

    async def wait_ready(self) -> Ready:
        await self._ready.wait()
        if self._death is not None:
            raise self._death
        assert self.info is not None
        return self.info

    async def wait_dead(self) -> EngineDeadError:
        await self._dead.wait()
        assert self._death is not None
        return self._death

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    def admit(self, tenant: str = "") -> None:
        if self._death is not None:
            raise self._death
        if self.state != "ready":
            raise EngineUnavailableError(self.state, f"The server is {self.state}; try again.")
        self._queue.check(1, 0, self._stats, tenant)

    async def num_cached(
        self,
        prompt: Sequence[int],
        salt: str,
        encoder_prompt: Sequence[int] = (),
        adapter: int = 0,
        images: Sequence[Image] = (),
    ) -> int:
        places = tuple(image.without_pixels for image in images)
        lookup = CacheLookup(
            self.next_id(), list(prompt), salt, list(encoder_prompt), adapter, places
        )
        found: int = await self._answer_to(lookup)
        return found

    async def look(self, request: LensRequest) -> LensResult:
        try:
            result: LensResult = await self._answer_to(request)
        except asyncio.CancelledError:
            if self._death is None:
                self._send(Abort([request.id]))
            raise
        return result

    async def load_adapter(self, adapter: int, path: str) -> str:
        problem: str = await self._answer_to(LoadAdapter(self.next_id(), adapter, path))
        return problem

    def unload_adapter(self, adapter: int) -> None:
        if self._death is None:
            self._send(UnloadAdapter(adapter))

    async def _answer_to(self, message: CacheLookup | LensRequest | LoadAdapter) -> Any:
        if self._death is not None:
            raise self._death
        if self.info is None:
            raise EngineUnavailableError(self.state, f"The server is {self.state}; try again.")
        self._begin_to_wait()
        lookup = self._lookups[message.id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            return await lookup
        finally:
            del self._lookups[message.id]

    def watch(self, listener: WatchListener | None) -> int:
        self._observation.watcher = listener
        watch_id = self.next_id()
        self._observation.awaited = 0
        if self._death is None:
            self._send(Watch(watch_id, listener is not None))
            if listener is not None:
                self._observation.awaited = watch_id
        elif listener is not None:
            listener(self._death)
        return watch_id

    def measure_waits(self, listener: WaitListener | None) -> None:
        if listener is not None:
            self._observation.wait_listener = listener
        if self._death is None:
            waited = self._child.waited_ns() if self._child else -1
            self._send(MeasureWaits(listener is not None, waited))

    def reserve(self, tenant: str = "") -> contextlib.AbstractContextManager[None]:
        return self._queue.reserve(self._stats, tenant)

    def submit(self, requests: Sequence[GenerateRequest]) -> OutputStream[TokenOutput]:
        return self._submit(requests, [1] * len(requests))

    def embed(self, requests: Sequence[EmbedRequest]) -> OutputStream[EmbedOutput]:
        # A text holds no row and no blocks, and an HTTP request may bring thousands of them. So the
        # last text counts as one request, and the others as none.
        return self._submit(requests, [0] * (len(requests) - 1) + [1])

    def _submit(self, requests: Sequence[Request], counts: Sequence[int]) -> OutputStream[Any]:
        sizes = [request.size for request in requests]
        if self._death is not None:
            raise self._death
        tenant = requests[0].tenant if requests else ""
        pixels = sum(request.pixel_bytes for request in requests)
        self._queue.check(sum(counts), sum(sizes), self._stats, tenant, pixels)
        self._begin_to_wait()
        stream: OutputStream[Any] = OutputStream([r.id for r in requests], self._abort)
        try:
            for request, count, size in zip(requests, counts, sizes, strict=True):
                self._streams[request.id] = stream
                self._queue.join(request.id, count, size, tenant, request.pixel_bytes)
                self._send(request)
        except BaseException:
            stream.close()  # abort the requests already sent: the caller gets no stream
            raise
        return stream

    def _abort(self, ids: list[int]) -> None:
        for request_id in ids:
            self._streams.pop(request_id, None)
        self._queue.forget(ids)
        if self._death is None:
            self._send(Abort(ids))

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    def last_step_age(self) -> float:
        return time.monotonic() - self._last_sign if self._waits else 0.0

    def drain(self) -> None:
        if self.state in ("loading", "ready"):
            self.state = "draining"

    async def stop(self) -> None:
        if self._child is None:
            return
        process = self._child.process
        if self._hang_watch is not None:
            self._hang_watch.cancel()
        if self._death is None:
            self._fail(EngineDeadError("The server has shut down."))
            if self.info is None:
                process.kill()  # it reads no messages while it loads, and has no work to lose
            else:
                self._endpoint.send(Shutdown())
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait), EXIT_S)
        except TimeoutError:
            process.kill()
        self.state = "dead"
        self._child.close()
