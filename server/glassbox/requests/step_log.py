"""Recorder: the engine's last steps, and the requests that took part in them.

Watching is a lease. The recorder listens to steps only while a request with the header
X-Penstock-UI holds one. Without a lease it has no listener and makes no object. It keeps integers
and times only, no text and no token id.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from engine.client.inspection import WaitListener
from engine.client.shares import Shares
from engine.protocol.outputs import PrefillChunk, StepOutputs
from engine.protocol.watch import StepWaits
from server.telemetry.choice_record import ChoiceRecord

FIT_STEPS = 2048  # steps that the step model is fitted to
MAX_REQUESTS = 64
STEP_BYTES = 6 << 20  # of all steps kept
REQUEST_BYTES = 2 << 20  # of all requests kept, without their steps
MOST_LENGTHS = 1024  # lengths of sequences that are not in the current step
GONE = 0  # stands for sequences that left during a step; the client's ids begin at 1


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The tokens that one step computed, by request. Times are CLOCK_MONOTONIC seconds.

    A step begins at the end of the last one if that left work, else at its launch. So the steps of
    a busy engine leave no gaps, and the time between two launches belongs to the later one.
    """

    number: int  # the engine's count of steps
    begin: float
    end: float
    chunks: Sequence[PrefillChunk]
    decode_ids: array[int]
    contexts: array[int]  # keys that each decode attended to; 0: unknown
    encoded_ids: tuple[int, ...]  # requests with a text that was encoded
    encoded_tokens: int  # of all these texts together
    # Seconds that threads of the engine waited for a core: before the step, while there was none;
    # in it, the longest of one, and the sum of all.
    idle_wait: float = 0.0
    longest_wait: float = 0.0
    total_wait: float = 0.0

    @property
    def num_bytes(self) -> int:
        """About how much memory the step takes."""
        return 320 + 72 * len(self.chunks) + 16 * len(self.decode_ids) + 8 * len(self.encoded_ids)


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A recorded request that the engine is still working on."""

    request_id: str
    tenant: str
    arrival: float  # CLOCK_MONOTONIC seconds
    ids: tuple[int, ...]  # the engine's ids of its choices
    first_step: int  # place of the first step that may matter, counted from the first ever recorded


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request that has ended. `error` is the reason if it was aborted."""

    opened: OpenRequest
    ended: float  # CLOCK_MONOTONIC seconds
    past_step: int  # place behind the last step
    choices: Sequence[ChoiceRecord]
    error: str | None

    @property
    def num_bytes(self) -> int:
        """About how much memory the request takes, without its steps."""
        prefills = sum(len(choice.prefills) for choice in self.choices)
        return 512 + 256 * len(self.choices) + 160 * prefills


class Recorder:
    """Keeps the last steps and the last requests, within fixed numbers and bytes.

    `listeners` is the client's list of step listeners; `measure_waits` is the client's method.
    Everything runs in the event loop's thread.
    """

    def __init__(
        self,
        listeners: list[Callable[[StepOutputs], None]],
        measure_waits: Callable[[WaitListener | None], None] = lambda _: None,
    ) -> None:
        self._listeners = listeners
        self._measure_waits = measure_waits
        self._leases = 0
        self._steps: deque[RecordedStep] = deque()
        self._first_place = 0  # of the oldest step kept
        self._step_bytes = 0
        self._open: dict[int, OpenRequest] = {}  # by the engine's id of the first choice
        self._closed: deque[RecordedRequest] = deque()
        self._number = Shares(MAX_REQUESTS)  # of the requests that have ended
        self._request_bytes = Shares(REQUEST_BYTES)
        self._contexts: dict[int, int] = {}  # tokens of each sequence that decodes, by its id
        self._busy_until = 0.0  # end of the last step if it left work

    # Leases

    @property
    def is_leased(self) -> bool:
        return self._leases > 0

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Record steps, and all requests submitted meanwhile, until the context ends."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        self._leases += 1
        if self._leases == 1:
            self._listeners.append(self._on_step)
            self._measure_waits(self._on_waits)

    def _release(self) -> None:
        self._leases -= 1
        if self._leases == 0:
            self._listeners.remove(self._on_step)
            self._measure_waits(None)
            self._contexts = {}
            self._busy_until = 0.0

    # Requests

    def begin(
        self, request_id: str, tenant: str, arrival: float, ids: Sequence[int]
    ) -> OpenRequest:
        """Start to record a request that was submitted right now. It holds a lease until `end`."""
        self._acquire()
        place = self._first_place + len(self._steps)
        opened = OpenRequest(request_id, tenant, arrival, tuple(ids), place)
        self._open[ids[0]] = opened
        return opened

    def end(
        self,
        opened: OpenRequest,
        ended: float,
        choices: Sequence[ChoiceRecord],
        error: str | None,
    ) -> None:
        """Keep a request that ended at the time `ended`, and give back its lease."""
        del self._open[opened.ids[0]]
        place = self._first_place + len(self._steps)
        request = RecordedRequest(opened, ended, place, choices, error)
        self._closed.append(request)
        self._number.take(opened.tenant)
        self._request_bytes.take(opened.tenant, request.num_bytes)
        for held in (self._number, self._request_bytes):
            while not held.has_room(0):
                self._forget_oldest(held.largest)
        self._release()

    def _forget_oldest(self, tenant: str) -> None:
        """Forget the oldest request of the tenant that holds most."""
        oldest = next(request for request in self._closed if request.opened.tenant == tenant)
        self._closed.remove(oldest)
        self._number.give_back(tenant)
        self._request_bytes.give_back(tenant, oldest.num_bytes)

    @property
    def open_requests(self) -> list[OpenRequest]:
        """The recorded requests that are still running, the oldest first."""
        return list(self._open.values())

    @property
    def requests(self) -> list[RecordedRequest]:
        """The recorded requests that have ended, the oldest first."""
        return list(self._closed)

    # Steps

    def steps_for_fit(self) -> list[RecordedStep]:
        """Return the last FIT_STEPS steps, the oldest first."""
        return list(islice(self._steps, max(0, len(self._steps) - FIT_STEPS), None))

    def steps_of(self, request: RecordedRequest) -> list[RecordedStep]:
        """Return the steps from a request's submission to its end that are kept."""
        first = max(0, request.opened.first_step - self._first_place)
        return list(islice(self._steps, first, max(0, request.past_step - self._first_place)))

    def _on_step(self, outputs: StepOutputs) -> None:
        stats = outputs.stats
        if stats.step_seconds <= 0:
            return  # only the stats have changed
        launched = outputs.at - stats.step_seconds
        begin = self._busy_until or launched
        self._busy_until = outputs.at if stats.running + stats.waiting else 0.0
        step = self._recorded(outputs, begin)
        self._steps.append(step)
        self._step_bytes += step.num_bytes
        self._forget_steps()

    def _on_waits(self, waits: StepWaits) -> None:
        """Note the waits of the last step; those of the last one of a lease come after its end."""
        if self._steps and self._steps[-1].number == waits.step:
            last = self._steps[-1]
            self._steps[-1] = replace(
                last, idle_wait=waits.idle, longest_wait=waits.longest, total_wait=waits.total
            )

    def _recorded(self, outputs: StepOutputs, begin: float) -> RecordedStep:
        """Return a step, and note how long the sequences in it are now."""
        stats, contexts = outputs.stats, {}
        chunked: dict[int, int] = {}
        for chunk in outputs.prefills:
            chunked[chunk.id] = chunk.count
            contexts[chunk.id] = chunk.start + chunk.count
        decode_ids, keys = array("q"), array("q")
        num_last_tokens = 0  # chunks of one token that sampled, which the stats count as decodes
        for output in outputs.tokens:
            if output.id in chunked:
                num_last_tokens += chunked[output.id] == 1
                continue
            known = self._contexts.get(output.id, 0)
            length = known + 1 if known else 0
            contexts[output.id] = length
            decode_ids.append(output.id)
            keys.append(length)
        for _ in range(stats.step_decode_tokens - len(decode_ids) - num_last_tokens):
            decode_ids.append(GONE)
            keys.append(0)
        self._note(contexts)
        in_chunks = sum(chunk.count for chunk in outputs.prefills)
        tokens = stats.step_prefill_tokens + stats.step_decode_tokens
        encoded_tokens = max(0, tokens - in_chunks - len(decode_ids))
        encoded_ids: tuple[int, ...] = ()
        if encoded_tokens:  # a source is encoded with the first chunk behind it
            first = [chunk.id for chunk in outputs.prefills if not chunk.start]
            encoded_ids = (*first, *[vector.id for vector in outputs.embeddings])
        return RecordedStep(
            number=stats.step,
            begin=begin,
            end=outputs.at,
            chunks=outputs.prefills,
            decode_ids=decode_ids,
            contexts=keys,
            encoded_ids=encoded_ids,
            encoded_tokens=encoded_tokens,
        )

    def _note(self, contexts: dict[int, int]) -> None:
        """Note how long the sequences of a step are now. Those that were aborted never end."""
        self._contexts |= contexts
        if len(self._contexts) > MOST_LENGTHS + 2 * len(contexts):
            self._contexts = contexts

    def _forget_steps(self) -> None:
        """Forget the oldest steps: those that no request needs, and all beyond STEP_BYTES."""
        while len(self._steps) > FIT_STEPS or self._step_bytes > STEP_BYTES:
            if self._step_bytes <= STEP_BYTES and self._first_place >= self._first_needed:
                return
            self._step_bytes -= self._steps.popleft().num_bytes
            self._first_place += 1

    @property
    def _first_needed(self) -> int:
        """Place of the first step that a request kept here needs."""
        needed = [request.opened.first_step for request in self._closed]
        needed += [opened.first_step for opened in self._open.values()]
        return min(needed, default=self._first_place + 1)
