"""Inspectors: what looks into a running engine. The loop calls them, and knows none of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from engine.inspect.ablations import Ablations, ablatable_heads
from engine.inspect.core_waits import CoreWaits
from engine.inspect.lens import look, max_lens_tokens
from engine.inspect.lens_queue import LensQueue
from engine.inspect.watch import EngineWatch
from engine.models.base import Model
from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import Abort, GenerateRequest
from engine.protocol.lens import LensRequest
from engine.protocol.message import Message
from engine.protocol.outputs import EngineStats
from engine.protocol.ready import Ready
from engine.protocol.watch import MeasureWaits, Watch
from engine.runner.model_runner import ModelRunner
from engine.scheduling.between import Between, Outcome, RetiredStep
from engine.scheduling.scheduler import Scheduler


def with_limits(facts: Ready, model: Model) -> Ready:
    """Return `facts` with what the inspectors can do.

    With several ranks that is nothing: only steps reach the other ranks.
    """
    if facts.tensor_parallel_size > 1:
        return facts
    longest = min(max_lens_tokens(model), facts.max_model_len)
    return replace(facts, max_lens_tokens=longest, ablatable_heads=ablatable_heads(model))


class Inspectors(Between):
    """The inspectors of one engine. `send` sends a message to the API process.

    A lens waits for the requests that wait in the scheduler, and in the part `images`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        send: Callable[[Message], None],
        images: Between,
    ) -> None:
        self._scheduler, self._runner, self._send = scheduler, runner, send
        self._images = images
        self.ablations = Ablations(runner)
        self.lenses = LensQueue(partial(look, runner))
        self.watch: EngineWatch | None = None  # None without a viewer
        self.waits: CoreWaits | None = None  # None while no request is recorded

    @property
    def has_work(self) -> bool:
        return bool(self.lenses)

    def handle(self, message: Message) -> bool:
        match message:
            case LensRequest():
                self.lenses.add(message)
            case Watch():
                self._watch(message)
            case MeasureWaits():
                self.waits = CoreWaits(message.waited_ns) if message.on else None
            case Abort():
                self.lenses.drop(message.ids)
                return False
            case _:
                return False
        return True

    def queued(self, request: GenerateRequest | EmbedRequest) -> None:
        if isinstance(request, EmbedRequest):
            return
        if self.waits is not None:
            self.waits.arrived()
        if request.ablation is not None:
            self.ablations.add(request.id, request.ablation)
        if self.watch is not None:
            self.watch.add(request)

    def work(self, *, is_quiet: bool) -> Outcome | None:
        """Compute a piece of a lens, unless requests wait."""
        if not self.lenses:
            return None
        waiting = self._scheduler.waiting or self._scheduler.embeds.waiting
        is_free = not waiting and not self._images.has_work
        begin = time.monotonic()
        result = self.lenses.advance(is_free=is_free)
        end = time.monotonic()
        if self.watch is not None and is_free:
            self.watch.add_lens(begin, end)
        if result is not None:
            self._send(result)
            self.stepped(RetiredStep(end, self._stats()))
        return Outcome() if is_free or result is not None else None

    def stepped(self, retired: RetiredStep) -> None:
        """Report a step that was retired, or changes without a step."""
        if self.waits is not None and retired.step is not None:
            self._send(self.waits.of_step(retired.stats.step))
        if self.ablations:
            self.ablations.keep(self._scheduler.sequences)
        if self.watch is None:
            return
        trace = self.watch.trace(retired.stats, retired.step, retired.launched_at, retired.at)
        self._send(trace)

    def _watch(self, message: Watch) -> None:
        if not message.on:
            if self.watch is not None:
                self.watch.close()
            self.watch = None
            return
        stats = self._stats()
        if self.watch is None:
            self.watch = EngineWatch(self._scheduler)
        else:
            self.stepped(RetiredStep(time.monotonic(), stats))
        self._send(self.watch.blocks(message.id, stats))

    def _stats(self) -> EngineStats:
        return self._scheduler.stats(None, 0.0, self._runner.gauges())
