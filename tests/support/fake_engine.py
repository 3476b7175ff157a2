"""A scripted EngineClient without a process or a model. The test controls every event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engine.client.admission import AdmissionControl
from engine.client.inspection import WaitListener, WatchListener
from engine.client.interface import State
from engine.client.output_stream import OutputStream
from engine.config import EngineConfig
from engine.errors import (
    EngineDeadError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestRejectedError,
)
from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import GenerateRequest, Image, TokenLogprobs
from engine.protocol.journal import BlockEvent
from engine.protocol.lens import LensRequest, LensResult
from engine.protocol.outputs import Admission, EngineStats, PrefillChunk, StepOutputs, TokenOutput
from engine.protocol.ready import KVGroup, MemoryEntry, Progress, Ready
from engine.protocol.watch import Blocks, QueueState, RequestState, StepTrace
from engine.protocol.wire import ToEngine

Sent = TypeVar("Sent", GenerateRequest, EmbedRequest, LensRequest)
WIRE = msgspec.msgpack.Decoder(ToEngine)
Script = Callable[[GenerateRequest], Sequence[int]]
NOT_FINITE = -1  # in a script: the logits of this token are not finite

INFO = Ready(
    architecture="Fake",
    kind="decoder",
    dtype="float32",
    device="cpu",
    vocab_size=258,
    max_model_len=512,
    block_size=16,
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    parameters=1,
    weight_bytes=4,
    kv_cache_bytes=4,
    load_seconds=0.0,
    weights="01",
    attention_backend="fake",
    threads=1,
    kv_groups=(KVGroup(1),),
    memory=(MemoryEntry("weights", 4, 4),),
    max_lens_tokens=100,
    ablatable_heads=(4, 2),
)


def as_received(request: Sent) -> Sent:
    """Return the request as the engine would decode it. Raises if a field has the wrong type."""
    received: Sent = WIRE.decode(msgspec.msgpack.encode(request))
    return received


@dataclass
class Running:
    request: GenerateRequest
    stream: OutputStream[TokenOutput]
    tokens: list[int]
    done: int = 0


@dataclass
class FakeEngine:
    """Gives each request the tokens of `script`, one per step, and repeats them if needed.

    No step runs while `gate` is cleared. `burst` is the number of steps delivered together.
    """

    script: Script
    state: State = "ready"
    info: Ready | None = INFO
    burst: int = 1
    delay: float = 0.0
    overloaded: bool = False
    queue: AdmissionControl = field(default_factory=lambda: AdmissionControl(EngineConfig()))
    reject: RequestRejectedError | None = None
    progress: Progress = field(default_factory=lambda: Progress("ready", 1.0))
    stats: EngineStats = field(default_factory=EngineStats)
    step_listeners: list[Callable[[StepOutputs], None]] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)
    death: EngineDeadError | None = None
    config_error: bool = False
    cached_tokens: int = 0
    lookups: list[tuple[list[int], str, list[int]]] = field(default_factory=list)
    adapters: dict[int, str] = field(default_factory=dict)  # paths of those loaded while serving
    adapter_problem: str = ""  # why the next one is refused
    lookup_adapters: list[int] = field(default_factory=list)  # of each lookup
    looks: list[LensRequest] = field(default_factory=list)
    lens: Callable[[LensRequest], LensResult] = lambda request: LensResult(request.id)
    watcher: WatchListener | None = None
    wait_listener: WaitListener | None = None  # None: waits are not measured
    watch_calls: list[bool] = field(default_factory=list)  # whether each began to watch

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.lens_gate = asyncio.Event()  # no lens is computed while it is cleared
        self.lens_gate.set()
        self.loaded = asyncio.Event()
        if self.info is not None:
            self.loaded.set()
        self._work = asyncio.Event()
        self._died = asyncio.Event()
        self._ids = 0
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop

    async def wait_ready(self) -> Ready:
        await self.loaded.wait()
        assert self.info is not None
        return self.info

    async def wait_dead(self) -> EngineDeadError:
        await self._died.wait()
        assert self.death is not None
        return self.death

    def die(self, message: str = "secret reason at /home/x 0xdead") -> None:
        if self.state != "draining":
            self.state = "dead"
        self.death = EngineDeadError(message)
        for running in self.running.values():
            running.stream.fail(self.death)
        if self.watcher is not None:
            self.watcher(self.death)
        self.running.clear()
        self._died.set()

    def admit(self, tenant: str = "") -> None:
        if self.death is not None:
            raise self.death
        if self.state != "ready":
            raise EngineUnavailableError(self.state, "not now")
        self._check_room()

    def reserve(self, tenant: str = "") -> contextlib.AbstractContextManager[None]:
        return self.queue.reserve(self.stats, tenant)

    async def num_cached(
        self,
        prompt: Sequence[int],
        salt: str,
        encoder_prompt: Sequence[int] = (),
        adapter: int = 0,
        images: Sequence[Image] = (),
    ) -> int:
        if self.death is not None:
            raise self.death
        self.lookups.append((list(prompt), salt, list(encoder_prompt)))
        self.lookup_adapters.append(adapter)
        return min(self.cached_tokens, len(prompt) + len(encoder_prompt))

    async def load_adapter(self, adapter: int, path: str) -> str:
        if self.death is not None:
            raise self.death
        self.adapters[adapter] = path
        await self.gate.wait()
        return self.adapter_problem

    def unload_adapter(self, adapter: int) -> None:
        self.adapters.pop(adapter, None)

    async def look(self, request: LensRequest) -> LensResult:
        if self.death is not None:
            raise self.death
        self.looks.append(as_received(request))
        await self.lens_gate.wait()
        return self.lens(request)

    def measure_waits(self, listener: WaitListener | None) -> None:
        self.wait_listener = listener

    def watch(self, listener: WatchListener | None) -> int:
        """Answer with the running requests; each has one block, which has its id."""
        self.watcher = listener
        self.watch_calls.append(listener is not None)
        watch_id = self.next_id()
        self._added: list[RequestState] = []
        self._ended: list[int] = []
        if listener is not None and self.death is not None:
            listener(self.death)
        elif listener is not None:
            states = [self._state(running) for running in self.running.values()]
            blocks = Blocks(watch_id, states, [], QueueState(), self.stats)
            asyncio.get_running_loop().call_soon(self._send, blocks)
        return watch_id

    def _send(self, message: StepTrace | Blocks) -> None:
        if self.watcher is not None:
            self.watcher(message)

    def _state(self, running: Running) -> RequestState:
        request = running.request
        tables = ((request.id,),) if running.done else ()
        return RequestState(
            request.id, request.arrival, 0, len(request.prompt), 0, running.done, False, tables
        )

    def _trace(self, at: float, prefills: list[PrefillChunk], outputs: list[TokenOutput]) -> None:
        begun = {chunk.id for chunk in prefills}
        ends = [output.id for output in outputs if output.finish] + self._ended
        added, self._added, self._ended = self._added, [], []
        events = [BlockEvent("take", key, 0, 0, (key,)) for key in sorted(begun)]
        events += [BlockEvent("end", key) for key in ends]
        decodes = [output.id for output in outputs if output.id not in begun]
        self._send(
            StepTrace(
                self.stats.step,
                at - 0.001,
                at,
                prefills,
                decodes,
                [],
                added,
                events,
                QueueState(),
                len(self.running),
                0,
            )
        )

    def _check_room(self) -> None:
        if self.overloaded:
            raise EngineOverloadedError("The queue is full.", retry_after=7)

    def submit(self, requests: Sequence[GenerateRequest]) -> OutputStream[TokenOutput]:
        if self.death is not None:
            raise self.death
        self._check_room()
        stream: OutputStream[TokenOutput] = OutputStream([r.id for r in requests], self._abort)
        for request in map(as_received, requests):
            self.requests.append(request)
            running = Running(request, stream, list(self.script(request)))
            self.running[request.id] = running
            if self.watcher is not None:
                self._added.append(self._state(running))
        self._work.set()
        return stream

    def _abort(self, ids: list[int]) -> None:
        self.aborted += ids
        for request_id in ids:
            self.running.pop(request_id, None)
            if self.watcher is not None:
                self._ended.append(request_id)

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def last_step_age(self) -> float:
        return 0.0

    def drain(self) -> None:
        self.state = "draining"

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self.gate.wait()
            for _ in range(self.burst):
                self._step()
            if not self.running:
                self._work.clear()
            await asyncio.sleep(self.delay)

    def _step(self) -> None:
        at = time.monotonic()
        outputs, prefills = [], []
        for running in list(self.running.values()):
            if self.reject is not None:
                running.stream.fail(self.reject)
                del self.running[running.request.id]
                continue
            if not running.done:
                admission = Admission(running.request.id, at, self.cached_tokens)
                running.stream.admissions[running.request.id] = admission
                prefill = PrefillChunk(running.request.id, 0, len(running.request.prompt))
                begin = max(at - 0.001, running.request.arrival)  # not before the request's arrival
                running.stream.add_prefill(begin, at, prefill)
                prefills.append(prefill)
            output = self._sample(running)
            running.stream.deliver(at, output)
            outputs.append(output)
            if output.finish is not None:
                del self.running[running.request.id]
        old = self.stats
        self.stats = EngineStats(
            step=old.step + 1,
            running=len(self.running),
            blocks_held=len(self.running),
            blocks_total=64,
            prefix_queries=old.prefix_queries + len(outputs),
            prefix_hits=old.prefix_hits + 1,
            step_seconds=0.001,
        )
        for listen in self.step_listeners:
            listen(StepOutputs(at, outputs, [], self.stats, prefills=prefills))
        if self.watcher is not None:
            self._trace(at, prefills, outputs)

    def _sample(self, running: Running) -> TokenOutput:
        params = running.request.params
        token = running.tokens[running.done % len(running.tokens)]
        running.done += 1
        if token == NOT_FINITE:
            return TokenOutput(running.request.id, -1, "error")
        finish = "length" if running.done >= params.max_tokens else None
        if token in params.stop_token_ids and running.done > params.min_tokens:
            finish = "stop"
        logprobs = None
        if params.logprobs >= 0:
            top = [(token, -0.5), (token ^ 1, -1.5), (65, float("-inf"))]
            logprobs = TokenLogprobs(-0.5, tuple(top[: params.logprobs]))
        scores: tuple[TokenLogprobs, ...] = ()
        if params.prompt_logprobs >= 0 and running.done == 1:
            scores = scores_of(running.request)
        return TokenOutput(running.request.id, token, finish, logprobs, scores)


def scores_of(request: GenerateRequest) -> tuple[TokenLogprobs, ...]:
    """Return the prompt logprobs of all tokens but the first.

    The n-th token has logprob -n; one other token is likelier.
    """
    count = request.params.prompt_logprobs
    scores = []
    for place, token in enumerate(request.prompt[1:], 1):
        top = [(token ^ 1, -0.25), (token, -place), (200, float("-inf"))]
        scores.append(TokenLogprobs(-place, tuple(top[:count]), 2))
    return tuple(scores)
