"""Watching: what the engine reports about its steps, requests and KV blocks to a viewer.

Without a viewer there is no EngineWatch, and the block pool has no journal.
"""

from __future__ import annotations

from engine.protocol.generate import GenerateRequest
from engine.protocol.outputs import EngineStats, PrefillChunk
from engine.protocol.watch import Blocks, QueueState, RequestState, StepTrace
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step

MOST_WAITING = 32  # requests of the queue that are reported


class EngineWatch:
    """Keeps the scheduler's journal from its creation until `close`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._added: list[RequestState] = []
        self._lenses: list[tuple[float, float]] = []
        scheduler.pool.journal = []

    def close(self) -> None:
        self._scheduler.pool.journal = None

    def add(self, request: GenerateRequest) -> None:
        """Note that a request has arrived."""
        self._added.append(
            RequestState(request.id, request.arrival, request.priority, len(request.prompt))
        )

    def add_lens(self, begin: float, end: float) -> None:
        """Note that a piece of a lens was computed."""
        self._lenses.append((begin, end))

    def trace(self, stats: EngineStats, step: Step | None, launched: float, at: float) -> StepTrace:
        """Return what happened since the last trace; a step, if any, was retired `at`."""
        pool = self._scheduler.pool
        assert pool.journal is not None
        events, pool.journal = pool.journal, []
        added, self._added = self._added, []
        lenses, self._lenses = self._lenses, []
        chunks: list[PrefillChunk] = []
        decodes: list[int] = []
        encoded: list[PrefillChunk] = []
        if step is not None:
            chunks = list(step.prefills)
            in_chunks = {chunk.id for chunk in chunks}
            decodes = [s.id for s in step.slices if s.id not in in_chunks and s.draft < 0]
            encoded = [PrefillChunk(e.id, 0, len(e.tokens)) for e in step.encoder_inputs]
        return StepTrace(
            step=stats.step,
            launched=launched,
            at=at,
            chunks=chunks,
            decodes=decodes,
            encoded=encoded,
            added=added,
            events=events,
            queue=self._queue(),
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            lenses=lenses,
        )

    def blocks(self, watch_id: int, stats: EngineStats) -> Blocks:
        """Return the tables of all requests, and what the prefix cache finds."""
        return Blocks(
            id=watch_id,
            requests=[_state(sequence) for sequence in self._scheduler.sequences.values()],
            findable=self._scheduler.pool.findable,
            queue=self._queue(),
            stats=stats,
        )

    def _queue(self) -> QueueState:
        waiting = self._scheduler.waiting
        if not waiting:
            return QueueState()
        return QueueState(
            ids=tuple(sequence.id for sequence in waiting.sequences[:MOST_WAITING]),
            reason=waiting.reason,
            needed=waiting.needed,
            available=waiting.available,
            sharing=waiting.sharing,
        )


def _state(sequence: Sequence) -> RequestState:
    """Return the present state of a request."""
    return RequestState(
        sequence.id,
        sequence.arrival,
        sequence.priority,
        sequence.prompt_length,
        sequence.num_cached,
        sequence.num_outputs,
        sequence.admitted and sequence.row < 0,
        tuple(tuple(table) for table in sequence.tables),
    )
