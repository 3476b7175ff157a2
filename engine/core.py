"""EngineCore: the loop of the engine process. It takes messages, runs steps and sends outputs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from engine.adapters import Adapters
from engine.config import EngineConfig
from engine.errors import RequestRejectedError
from engine.protocol.adapters import LoadAdapter, UnloadAdapter
from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import Abort, CacheLookup, GenerateRequest
from engine.protocol.message import Message
from engine.protocol.outputs import Admission, EngineStats, Rejected, StepOutputs
from engine.protocol.ready import Ready, Shutdown
from engine.runner.model_runner import ModelRunner
from engine.runner.pending_step import PendingStep
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation import Drafter, ngram_drafter
from engine.scheduling.step import Step

# In tokens: see BlockTables. A GPU computes a block faster than the host launches the copies.
COPIED_PART = 16


class Endpoint(Protocol):
    """The engine's end of the channel: a zmq endpoint, or lists in a test."""

    def drain(self, *, block: bool) -> Sequence[Message]: ...

    def send(self, message: Message) -> None: ...


class Inspection(Protocol):
    """The part that looks into the engine: `engine/inspect/inspectors.py`."""

    @property
    def has_work(self) -> bool: ...

    def handle(self, message: Message) -> None:
        """Take a message: one of its own, or a request that was queued, or an Abort."""

    def work(self) -> None:
        """Do a piece of work between two steps."""

    def stepped(self, pending: PendingStep | None, now: float, stats: EngineStats) -> None:
        """A step was retired, or counts have changed without a step."""


def _drafter(config: EngineConfig, runner: ModelRunner) -> Drafter | None:
    """Return what drafts tokens: the draft model if there is one, else n-grams."""
    if config.speculation == "off":
        return None
    return runner.drafter or ngram_drafter()


class EngineCore:
    """Runs scheduler and runner in one loop.

    `depth` is how many steps may be in flight while the next one is scheduled. With 0 the loop
    waits for each step; with 1 the host schedules the next step while the device computes.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        facts: Ready,
        endpoint: Endpoint,
        *,
        depth: int = 0,
    ) -> None:
        self.scheduler = Scheduler(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_num_encoder_tokens=facts.max_num_encoder_tokens,
            context_cost=facts.context_cost,
            groups=facts.kv_groups,
            # The queue is unbounded here: the client has applied its limits to whole submissions.
            prefix_caching=config.enable_prefix_caching,
            part_size=COPIED_PART if facts.device == "cpu" else 0,
            drafter=_drafter(config, runner),
            num_adapter_slots=facts.max_loras,
        )
        self.scheduler.speculation.grammars = runner.matchers
        self.facts = facts
        self.runner = runner
        self.matchers = runner.matchers
        self.adapters = Adapters(self.scheduler, runner, endpoint.send)
        self.endpoint = endpoint
        self.depth = depth
        self.in_flight: deque[PendingStep] = deque()
        self.admitted: list[Admission] = []  # not sent yet
        self.inspection: Inspection | None = None  # None: nothing can look into this engine
        self.running = True
        self.num_handled = 0  # messages

    def run(self) -> None:
        """Run until a Shutdown message arrives."""
        while self.running:
            self.turn()
        self.matchers.close()
        self.adapters.close()

    def turn(self) -> None:
        """Run the loop body once: handle messages, launch a step, retire a step that is due."""
        messages = self.endpoint.drain(block=False)
        inspects = self.inspection is not None and self.inspection.has_work
        has_work = self.scheduler.has_work or self.in_flight or inspects
        idle = not messages and not has_work
        if idle and self.matchers.is_compiling:
            if self.matchers.wait():
                self._send_stats()
        elif idle and not self.adapters.is_loading and not self.runner.capture_when_idle():
            messages = self.endpoint.drain(block=True)
        self.num_handled += len(messages)
        for message in messages:
            self.handle(message)
        refused = self.adapters.finish_loads()
        for request, error in self.matchers.compiled():
            if error is None:
                self._add(request)
            else:
                refused[request.id] = error
        for request_id, refusal in refused.items():
            self.scheduler.abort([request_id])
            self._reject(request_id, refusal)
        step = self.scheduler.schedule()
        self.adapters.start_loads()
        if step:
            pending = self.runner.launch(step)
            self.in_flight.append(pending)
            self.admitted += self.scheduler.waiting.take_admissions(pending.launched_at)
        if self.in_flight and (len(self.in_flight) > self.depth or not step):
            self.publish(self.in_flight.popleft())
        elif (messages or refused) and not step:
            # Nothing was computed, but aborts changed the counts of requests and blocks.
            self._send_stats()
        elif not step and self.matchers.is_waiting and self.matchers.wait():
            self._send_stats()
        elif not step and self.adapters.is_loading:
            self.adapters.wait()
        if self.inspection is not None and self.inspection.has_work:
            self.inspection.work()

    def _send_stats(self) -> None:
        """Send the counts without a step. The client takes each message as a sign of life."""
        now, stats = time.monotonic(), self.stats()
        self.endpoint.send(StepOutputs(now, [], [], stats, num_handled=self.num_handled))
        if self.inspection is not None:
            self.inspection.stepped(None, now, stats)

    def handle(self, message: Message) -> None:
        match message:
            case GenerateRequest() if message.grammar:
                self.matchers.compile(message)
            case GenerateRequest() | EmbedRequest():
                self._add(message)
            case Abort():
                self.matchers.drop(message.ids)
                self.scheduler.abort(message.ids)
                self._inspect(message)
            case CacheLookup():
                found = {message.id: self.scheduler.num_cached(message)}
                now, count = time.monotonic(), self.num_handled
                self.endpoint.send(
                    StepOutputs(now, [], [], self.stats(), lookups=found, num_handled=count)
                )
            case LoadAdapter() | UnloadAdapter():
                self.adapters.handle(message)
            case Shutdown():
                self.running = False
            case _:
                self._inspect(message)

    def _inspect(self, message: Message) -> None:
        if self.inspection is not None:
            self.inspection.handle(message)

    def _add(self, request: GenerateRequest | EmbedRequest) -> None:
        """Queue a request, or refuse it if it can never run."""
        try:
            if isinstance(request, GenerateRequest):
                self.adapters.check(request)
            self.scheduler.add(request)
        except RequestRejectedError as error:
            self._reject(request.id, error)
            return
        self._inspect(request)

    def _reject(self, request_id: int, error: RequestRejectedError) -> None:
        self.matchers.drop([request_id])
        self.endpoint.send(Rejected(request_id, error.code, error.message, error.param))

    def publish(self, pending: PendingStep) -> None:
        """Wait for the results of a step and send its outputs."""
        sampled = pending.wait()
        now = time.monotonic()
        for explained in pending.explained():
            self.endpoint.send(explained)
        self.matchers.accept(pending.step, sampled)
        outputs = self.scheduler.retire(pending.step, sampled, pending.prompt_logprobs())
        self.matchers.drop(output.id for output in outputs if output.finish)
        admitted, self.admitted = self.admitted, []
        vectors = self.scheduler.embeds.retire(pending.embeddings())
        stats = self.stats(pending.step, now - pending.launched_at)
        prefills = list(pending.step.prefills)
        self.endpoint.send(
            StepOutputs(
                now, outputs, admitted, stats, vectors, prefills, num_handled=self.num_handled
            )
        )
        if self.inspection is not None:
            self.inspection.stepped(pending, now, stats)

    def stats(self, step: Step | None = None, seconds: float = 0.0) -> EngineStats:
        """Return the stats after `step`, if any, which took `seconds`."""
        return self.scheduler.stats(step, seconds, self.runner.gauges())
