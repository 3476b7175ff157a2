"""LiveEngine: the engine as viewers see it while it works.

Watching is a lease. Without a viewer the engine sends no StepTrace, and nothing here listens. The
first viewer begins to watch, the last one ends it. The map of blocks is rebuilt from events; each
snapshot of the engine checks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from engine.client.inspection import InspectedEngine
from engine.client.shares import Shares
from engine.errors import EngineDeadError
from engine.protocol.outputs import EngineStats, StepOutputs
from engine.protocol.watch import Blocks, QueueState, StepTrace
from server.glassbox.requests.step_log import Recorder
from server.glassbox.watch.block_map import BlockMap
from server.glassbox.watch.viewer import Counts, TracedStep, Viewer

MOST_VIEWERS = 4  # with an admin key, and as many without one
SNAPSHOT_S = 0.1  # least time between two questions for a snapshot

log = logging.getLogger(__name__)


class TooManyViewersError(Exception):
    """There are MOST_VIEWERS viewers, or the tenant has its share of them."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's own tables, with the number of the last trace before them."""

    number: int
    at: float  # CLOCK_MONOTONIC seconds
    blocks: Blocks
    counts: Counts


class LiveEngine:
    """Watches the engine for viewers. Everything runs in the event loop's thread."""

    def __init__(self, client: InspectedEngine, recorder: Recorder) -> None:
        self._client = client
        self._recorder = recorder
        self._leases = 0
        self._viewers: list[Viewer] = []
        # Admins have places of their own, so that others cannot keep them out.
        self._places = {is_admin: Shares(MOST_VIEWERS) for is_admin in (True, False)}
        self._outputs: list[StepOutputs] = []  # whose StepTrace has not come yet
        self._number = 0  # of the last trace
        self._last_end = 0.0  # of a step, CLOCK_MONOTONIC seconds
        self._watch_id = 0  # of the last question for a snapshot
        self._asked_at = 0.0  # CLOCK_MONOTONIC seconds
        self._answer: asyncio.Future[Snapshot] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.epoch = time.monotonic()  # viewers get times since then
        self.map: BlockMap | None = None  # None until the first snapshot
        self.stats = EngineStats()  # of the last trace or snapshot, as the next two
        self.queue = QueueState()
        self.counts = Counts()

    # Leases

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to see: the engine is dead, or a drain has ended."""
        state = self._client.state
        return state == "dead" or (state == "draining" and not self._client.busy)

    @contextlib.contextmanager
    def viewer(self, tenant: str = "", *, is_admin: bool = True) -> Iterator[Viewer]:
        """Watch until the context ends. Raises TooManyViewersError."""
        places = self._places[is_admin]
        if not places.has_room() or not places.may_take(tenant):
            raise TooManyViewersError
        places.take(tenant)
        viewer = Viewer()
        self._viewers.append(viewer)
        try:
            with self._recorder.lease(), self._lease():
                yield viewer
        finally:
            self._viewers.remove(viewer)
            places.give_back(tenant)

    @contextlib.contextmanager
    def _lease(self) -> Iterator[None]:
        self._leases += 1
        if self._leases == 1:
            self._client.step_listeners.append(self._on_step)
        try:
            yield
        finally:
            self._leases -= 1
            if self._leases == 0:
                self._end()

    def _end(self) -> None:
        self._client.step_listeners.remove(self._on_step)
        if self._timer is not None:
            self._timer.cancel()
        if self._watch_id:
            self._client.watch(None)
        self._answer = self._timer = self.map = None
        self._watch_id = 0
        self._outputs = []
        self._last_end = 0.0
        self.counts = Counts()

    # Snapshots

    async def snapshot(self) -> Snapshot:
        """Return the engine's own tables. It answers between two steps. Raises EngineDeadError."""
        with self._lease():
            if self._answer is None:
                loop = asyncio.get_running_loop()
                self._answer = loop.create_future()
                delay = self._asked_at + SNAPSHOT_S - time.monotonic()
                self._timer = loop.call_later(max(delay, 0.0), self._ask)
            return await asyncio.shield(self._answer)  # others may wait for it, too

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._watch_id = self._client.watch(self._on_message)

    # Messages

    def _on_step(self, outputs: StepOutputs) -> None:
        if self.map is not None:
            self._outputs.append(outputs)

    def _on_message(self, message: StepTrace | Blocks | EngineDeadError) -> None:
        match message:
            case StepTrace() if self.map is not None:  # else it belongs to a lease that has ended
                self._on_trace(message, self.map)
            case Blocks() if message.id == self._watch_id:
                self._on_blocks(message)
            case EngineDeadError() if self._answer is not None and not self._answer.done():
                self._answer.set_exception(message)

    def _on_trace(self, trace: StepTrace, block_map: BlockMap) -> None:
        now = time.monotonic()
        outputs, self._outputs = self._outputs, []
        stats = outputs[-1].stats if outputs else self.stats
        # A trace without outputs comes before a snapshot, and has later events than the stats.
        held, cached = trace.blocks_held, trace.blocks_cached
        self.stats = replace(stats, blocks_held=held, blocks_cached=cached)
        generated = sum(len(one.tokens) for one in outputs)
        prefilled = sum(one.stats.step_prefill_tokens for one in outputs)
        counts = self.counts
        self.counts = Counts(counts.prefilled + prefilled, counts.generated + generated)
        self.queue = trace.queue
        self._number += 1
        begin = max(trace.launched, self._last_end)
        if trace.launched:
            self._last_end = trace.at
        try:
            changed = block_map.apply(trace, outputs)
        except Exception:  # what is watched must not end what is served
            log.exception("A step that was watched cannot be shown.")
            self.map = None
            for viewer in self._viewers:
                viewer.lose(now)
            self._ask()
            return
        step = TracedStep(self._number, now, begin, trace, changed, self.stats, self.counts)
        for viewer in self._viewers:
            viewer.add(step)

    def _on_blocks(self, blocks: Blocks) -> None:
        now = time.monotonic()
        found = BlockMap(blocks)
        if self.map is not None and not self.map.equals(found):
            log.error("The watched blocks differ from the engine's tables.")
            for viewer in self._viewers:
                viewer.lose(now)
        self.map = found
        self.stats, self.queue = blocks.stats, blocks.queue
        for viewer in self._viewers:
            viewer.cut(self._number)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Snapshot(self._number, now, blocks, self.counts))
        self._answer = None
