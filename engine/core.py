"""EngineCore: the loop of the engine process. It takes messages, runs steps and sends outputs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from engine.errors import RequestRejectedError
from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import Abort, CacheLookup, GenerateRequest
from engine.protocol.message import Message
from engine.protocol.outputs import Admission, EngineStats, Rejected, StepOutputs
from engine.protocol.ready import Ready, Shutdown
from engine.runner.model_runner import ModelRunner
from engine.runner.pending_step import PendingStep
from engine.scheduling.between import Between, RetiredStep
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Step

SIGN_S = 0.2  # between signs of life while parts work or wait


class Endpoint(Protocol):
    """The engine's end of the channel: a zmq endpoint, or lists in a test."""

    def drain(self, *, block: bool) -> Sequence[Message]: ...

    def send(self, message: Message) -> None: ...


class EngineCore:
    """Runs scheduler, runner and the parts between steps in one loop.

    `depth` is how many steps may be in flight while the next one is scheduled. With 0 the loop
    waits for each step; with 1 the host schedules the next step while the device computes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        facts: Ready,
        endpoint: Endpoint,
        between: Sequence[Between],
        *,
        depth: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.facts = facts
        self.endpoint = endpoint
        self.between = between
        self.depth = depth
        self.in_flight: deque[PendingStep] = deque()
        self.admitted: list[Admission] = []  # not sent yet
        self.running = True
        self.num_handled = 0  # messages
        self._sent_at = 0.0  # the last StepOutputs

    def run(self) -> None:
        """Run until a Shutdown message arrives."""
        while self.running:
            self.turn()
        for part in self.between:
            part.close()

    def turn(self) -> None:
        """Run the loop body once: take messages, let parts work, launch a step, retire one."""
        messages = self.endpoint.drain(block=self._is_idle)
        self.num_handled += len(messages)
        for message in messages:
            self.handle(message)
        has_worked, has_refused = self._work(is_quiet=not messages)
        step = self.scheduler.schedule()
        if step:
            pending = self.runner.launch(step)
            self.in_flight.append(pending)
            self._admit(pending.launched_at)
        if self.in_flight and (len(self.in_flight) > self.depth or not step):
            self.publish(self.in_flight.popleft())
        elif not step and (messages or has_refused):
            # Nothing was computed, but aborts changed the counts of requests and blocks.
            self._send_stats()
        elif not step:
            self._pass_without_step(has_worked=has_worked)

    def _admit(self, launched_at: float) -> None:
        """Note which requests a step, launched now, computes for the first time."""
        for admission in self.scheduler.waiting.take_admissions(launched_at):
            for part in self.between:
                admission = part.admitted(admission)
            self.admitted.append(admission)

    # ---- parts between steps -----------------------------------------------------------------

    @property
    def _computes(self) -> bool:
        return bool(self.scheduler.has_work or self.in_flight)

    @property
    def _is_idle(self) -> bool:
        """Whether only a message can change anything."""
        return not self._computes and not any(p.has_work or p.is_waiting for p in self.between)

    def _work(self, *, is_quiet: bool) -> tuple[bool, bool]:
        """Let the parts work. Return whether one did so, and whether a request was refused."""
        has_worked = has_refused = False
        is_quiet = is_quiet and not self._computes and not any(p.is_waiting for p in self.between)
        for index, part in enumerate(self.between):
            outcome = part.work(is_quiet=is_quiet)
            if outcome is None:
                continue
            has_worked = True
            for request in outcome.ready:
                self._take(request, self.between[index + 1 :])
            for request_id, error in outcome.refused.items():
                has_refused = True
                self.scheduler.abort([request_id])
                self._reject(request_id, error)
        return has_worked, has_refused

    def _pass_without_step(self, *, has_worked: bool) -> None:
        """Wait a moment for a part, unless one has worked. Send a sign of life now and then.

        The client takes each StepOutputs as one, and an engine that is silent for long as hung.
        """
        waiting = next((part for part in self.between if part.is_waiting), None)
        if waiting is not None and not has_worked:
            waiting.wait()
        is_alive = has_worked or waiting is not None
        if is_alive and time.monotonic() > self._sent_at + SIGN_S:
            self._send_stats()

    # ---- messages ----------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        match message:
            case CacheLookup():
                found = {message.id: self.scheduler.num_cached(message)}
                now, count = time.monotonic(), self.num_handled
                self._send(StepOutputs(now, [], [], self.stats(), lookups=found, num_handled=count))
            case Shutdown():
                self.running = False
            case _:
                self._take(message, self.between)

    def _take(self, message: Message, parts: Sequence[Between]) -> None:
        """Give a message to `parts`. Unless one of them keeps it, a request is queued."""
        try:
            if any(part.handle(message) for part in parts):
                return
            match message:
                case GenerateRequest() | EmbedRequest():
                    self.scheduler.add(message)
                    for part in self.between:
                        part.queued(message)
                case Abort():
                    self.scheduler.abort(message.ids)
        except RequestRejectedError as error:
            assert isinstance(message, GenerateRequest | EmbedRequest)
            self._reject(message.id, error)

    def _reject(self, request_id: int, error: RequestRejectedError) -> None:
        """Refuse a request that is not in the queue, or not any more."""
        for part in self.between:
            part.handle(Abort([request_id]))
        self.endpoint.send(Rejected(request_id, error.code, error.message, error.param))

    # ---- outputs -----------------------------------------------------------------------------

    def publish(self, pending: PendingStep) -> None:
        """Wait for the results of a step and send its outputs."""
        sampled = self.runner.results(pending)
        now = time.monotonic()
        for explained in pending.explained():
            self.endpoint.send(explained)
        outputs = self.scheduler.retire(pending.step, sampled, pending.prompt_logprobs())
        admitted, self.admitted = self.admitted, []
        vectors = self.scheduler.embeds.retire(pending.embeddings())
        stats = self.stats(pending.step, now - pending.launched_at)
        prefills = list(pending.step.prefills)
        count = self.num_handled
        self._send(StepOutputs(now, outputs, admitted, stats, vectors, prefills, num_handled=count))
        retired = RetiredStep(now, stats, pending.step, pending.launched_at, outputs)
        for part in self.between:
            part.stepped(retired)

    def _send_stats(self) -> None:
        """Send the counts without a step."""
        now, stats = time.monotonic(), self.stats()
        self._send(StepOutputs(now, [], [], stats, num_handled=self.num_handled))
        for part in self.between:
            part.stepped(RetiredStep(now, stats))

    def _send(self, outputs: StepOutputs) -> None:
        self._sent_at = outputs.at
        self.endpoint.send(outputs)

    def stats(self, step: Step | None = None, seconds: float = 0.0) -> EngineStats:
        """Return the stats after `step`, if any, which took `seconds`."""
        return self.scheduler.stats(step, seconds, self.runner.gauges())
