"""EngineClient: the engine's async face in the API process.

`ProcessClient` has the engine as a child process, refuses work the queue has no room for,
routes outputs to one `OutputStream` per submission, and notices at once when the child ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from msgspec.structs import replace

from engine.child import EngineChild, how_it_ended
from engine.config import EngineConfig
from engine.errors import (
    EngineDeadError,
    EngineUnavailableError,
    RemoteTraceback,
    RequestRejectedError,
)
from engine.protocol import (
    TELL_STACKS,
    Abort,
    Admission,
    EmbedOutput,
    EmbedRequest,
    EngineStats,
    Fatal,
    FromEngine,
    GenerateRequest,
    Notice,
    Prefill,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    StepOutputs,
    TokenOutput,
)
from engine.waiting import WaitingQueue

log = logging.getLogger(__name__)
State = Literal["loading", "ready", "draining", "dead"]
LOOK_S = 0.5  # between two looks whether the engine has given a sign
LAST_WORDS_S = 0.5  # for an engine that hangs to write where it stands
LEAVE_S = 1.0  # for an engine to leave that is told to, before it is killed
Request = GenerateRequest | EmbedRequest
Output = TypeVar("Output", TokenOutput, EmbedOutput)


class OutputStream(Generic[Output]):
    """Outputs of the requests of one submission, merged; the slot between engine and reader.

    A slow reader costs one list: whatever has come since its last turn is handed over together.
    Iteration ends when every request has finished; it raises EngineDeadError when the engine dies
    and RequestRejectedError when the engine refuses a request.
    """

    def __init__(self, ids: Sequence[int], abort: Callable[[list[int]], None]) -> None:
        self.admissions: dict[int, Admission] = {}
        # By request, each with begin and end of its step.
        self.prefills: defaultdict[int, list[tuple[float, float, Prefill]]] = defaultdict(list)
        self._unfinished = set(ids)
        self._pending: list[tuple[float, Output]] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._abort = abort

    def deliver(self, at: float, output: Output) -> None:
        self._pending.append((at, output))
        if output.finish is not None:
            self._unfinished.discard(output.id)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    async def arrival(self) -> None:
        """Returns when there is something to read; raises where that is only an error."""
        await self._wake.wait()
        if self._error is not None and not self._pending:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[list[tuple[float, Output]]]:
        """Batches of (engine's time of the step, what it produced)."""
        while True:
            if self._pending:
                batch, self._pending = self._pending, []
                yield batch
            elif self._error is not None:
                raise self._error
            elif not self._unfinished:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    def finish(self, request_id: int) -> None:
        """The reader needs no more of this request (a stop string was found): abort it."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._abort([request_id])
            self._wake.set()

    def close(self) -> None:
        """Abort whatever is unfinished. Idempotent; belongs in the reader's `finally`."""
        if self._unfinished:
            self._abort(sorted(self._unfinished))
            self._unfinished.clear()


class EngineClient(Protocol):
    """What the server needs of an engine; tests implement it without a process."""

    state: State
    info: Ready | None  # None until the model is loaded
    progress: Progress
    on_step: Callable[[StepOutputs], None] | None  # called for every step, for metrics
    config_error: bool  # it died because what it was asked to serve cannot be served

    @property
    def stats(self) -> EngineStats:
        """As the last step told, but that those wait whom the engine has not taken up since."""

    async def start(self) -> None:
        """Start the engine; returns at once, loading goes on in the background."""

    async def wait_ready(self) -> Ready:
        """Waits for the model; raises EngineDeadError where loading failed."""

    async def wait_dead(self) -> EngineDeadError:
        """Waits until the engine has died unasked and says why."""

    def admit(self) -> None:
        """Whether there is room for one more request, cheap enough to ask before it is tokenised:
        raises EngineUnavailableError or EngineOverloadedError."""

    def expecting(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the place of a request that `admit` let in until it is submitted, which follows the
        context at once. Raises EngineOverloadedError where others have come first."""

    def submit(self, requests: Sequence[GenerateRequest]) -> OutputStream[TokenOutput]:
        """All or none, of a request that `admit` let in, if need be before a drain began; raises
        EngineDeadError, EngineOverloadedError and RequestRejectedError, counting prompt tokens."""

    def embed(self, requests: Sequence[EmbedRequest]) -> OutputStream[EmbedOutput]:
        """As `submit`, of texts that become vectors; to the queue they are one request."""

    def next_id(self) -> int: ...

    def last_step_age(self) -> float:
        """Seconds since the engine last gave a sign while it had work; 0 when it has none."""

    @property
    def busy(self) -> bool:
        """Whether accepted requests are unfinished."""

    def drain(self) -> None:
        """Refuse new work; what was admitted goes on, submitted or not."""

    async def stop(self) -> None:
        """End the engine process; idempotent."""


class ProcessClient:
    """EngineClient over a child process (`python -m engine.process`): `child`, where it has been
    begun already, or else one of its own."""

    def __init__(self, config: EngineConfig, child: EngineChild | None = None) -> None:
        self.config = config
        self.state: State = "loading"
        self.info: Ready | None = None
        self.progress = Progress("starting", 0.0)
        self._stats = EngineStats()
        self.on_step: Callable[[StepOutputs], None] | None = None
        self.config_error = False
        self._streams: dict[int, OutputStream[Any]] = {}
        self._queue = WaitingQueue(config)
        self._ids = 0
        self._last_sign = time.monotonic()
        self._fatal: str | None = None
        self._child = child
        self._vigil: asyncio.Task[None] | None = None
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
            self._child = EngineChild(self.config)
        self._endpoint = self._child.endpoint
        self._endpoint.listen(self._on_message)
        threading.Thread(target=self._watch, args=(self._child,), daemon=True).start()
        self._vigil = asyncio.create_task(self._watch_for_a_hang())

    def _watch(self, child: EngineChild) -> None:
        code = child.wait()
        with contextlib.suppress(RuntimeError):  # the loop may have closed first
            self._loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        if self._death is not None:
            return
        # With a status above 0 it has told why, as it may have before a signal: where the GPU has
        # failed, it aborts behind its last words. They may come in after the news of its end.
        wait_s = 1.0 if code > 0 else 0.1
        while self._fatal is None and self._endpoint.receive(wait_s):
            pass
        self._end(EngineDeadError(self._fatal or how_it_ended(code)))

    async def _watch_for_a_hang(self) -> None:
        """Ends an engine that owes a sign for `stall_timeout`. Turns are counted, not the clock:
        where we were stopped ourselves (Ctrl-Z, a paused container), so was the engine."""
        most = self.config.stall_timeout
        silent, sign = 0.0, self._last_sign
        while silent <= most:
            await asyncio.sleep(LOOK_S)
            silent = silent + LOOK_S if self._streams and sign == self._last_sign else 0.0
            sign = self._last_sign
        if self._death is None and self._child is not None:
            text = (
                f"The engine hung: it had work and gave no sign for {most:g} s "
                "(--stall-timeout, to be raised where single steps take that long)."
            )
            self._child.process.send_signal(TELL_STACKS)
            self._loop.call_later(LAST_WORDS_S, self._child.process.kill)
            self._end(EngineDeadError(text))

    def _end(self, death: EngineDeadError) -> None:
        """It is dead, and did not end because it was asked to."""
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
        self._streams.clear()
        self._queue.clear()

    def _on_message(self, message: FromEngine) -> None:
        self._last_sign = time.monotonic()
        match message:
            case StepOutputs() if self._fatal is None:  # else there may be a hole before it
                self._on_step(message)
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
                    stream.fail(RequestRejectedError(message.code, message.message))
            case Notice():
                log.log(message.level, "%s", message.text)
            case Fatal():
                self._fatal = message.message
                self.config_error = message.config_error
                if message.detail:  # for whoever mends it; users get the message alone
                    log.error("the engine failed", exc_info=RemoteTraceback(message.detail))
                if self._child is not None:
                    # For a message it did not send itself: see channel.py.
                    self._child.process.kill()

    def _on_step(self, outputs: StepOutputs) -> None:
        self._stats = outputs.stats
        self._queue.admitted((a.id for a in outputs.admitted), outputs.at)
        for admission in outputs.admitted:
            if stream := self._streams.get(admission.id):
                stream.admissions[admission.id] = admission
        for prefill in outputs.prefills:
            if stream := self._streams.get(prefill.id):
                begin = outputs.at - outputs.stats.step_seconds
                stream.prefills[prefill.id].append((begin, outputs.at, prefill))
        for output in outputs.tokens:
            self._deliver(outputs.at, output)
        for vector in outputs.embeddings:
            self._deliver(outputs.at, vector)
        if self.on_step is not None:
            self.on_step(outputs)

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

    def admit(self) -> None:
        if self._death is not None:
            raise self._death
        if self.state != "ready":
            raise EngineUnavailableError(self.state, f"The server is {self.state}; try again.")
        self._queue.check(1, 0, self._stats)

    def expecting(self) -> contextlib.AbstractContextManager[None]:
        return self._queue.expecting(self._stats)

    def submit(self, requests: Sequence[GenerateRequest]) -> OutputStream[TokenOutput]:
        return self._submit(requests, [1] * len(requests))

    def embed(self, requests: Sequence[EmbedRequest]) -> OutputStream[EmbedOutput]:
        # A text holds no row and no blocks, and one HTTP request may bring thousands: the last of
        # them counts for all.
        return self._submit(requests, [0] * (len(requests) - 1) + [1])

    def _submit(self, requests: Sequence[Request], counts: Sequence[int]) -> OutputStream[Any]:
        sizes = [request.size for request in requests]
        if self._death is not None:
            raise self._death
        self._queue.check(sum(counts), sum(sizes), self._stats)
        if not self._streams:
            self._last_sign = time.monotonic()  # an idle engine owes no sign
        stream: OutputStream[Any] = OutputStream([r.id for r in requests], self._abort)
        try:
            for request, count, size in zip(requests, counts, sizes, strict=True):
                self._streams[request.id] = stream
                self._queue.join(request.id, count, size)
                self._endpoint.send(request)
        except BaseException:
            stream.close()  # nobody else knows of those that were sent
            raise
        return stream

    def _abort(self, ids: list[int]) -> None:
        for request_id in ids:
            self._streams.pop(request_id, None)
        self._queue.forget(ids)
        if self._death is None:
            self._endpoint.send(Abort(ids))

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    def last_step_age(self) -> float:
        return time.monotonic() - self._last_sign if self._streams else 0.0

    def drain(self) -> None:
        if self.state in ("loading", "ready"):
            self.state = "draining"

    async def stop(self) -> None:
        if self._child is None:
            return
        process = self._child.process
        if self._vigil is not None:
            self._vigil.cancel()
        if self._death is None:
            self._fail(EngineDeadError("The server has shut down."))
            if self.info is None:
                process.kill()  # it hears nothing while it loads, and nothing is lost
            else:
                self._endpoint.send(Shutdown())
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait), LEAVE_S)
        except TimeoutError:
            process.kill()
        self.state = "dead"
        self._child.close()
