"""An engine double whose steps take a known time: a + b*prefill + c*decode + d*context.

It keeps its own books: what each request's tokens cost in each step. Tests compare a waterfall with
them. Times are seconds of a clock that only steps and `wait` move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from engine.client.inspection import WaitListener
from engine.protocol.outputs import Admission, EngineStats, PrefillChunk, StepOutputs, TokenOutput
from engine.protocol.watch import StepWaits
from server.glassbox.requests.step_log import OpenRequest, RecordedRequest, Recorder
from server.telemetry.choice_record import ChoiceRecord

PREFILL, DECODE, CONTEXT = 1e-4, 3e-4, 2e-8  # seconds
CONSTANT = 5e-3


@dataclass
class Job:
    """One sequence of the double."""

    id: int
    submitted: float
    prompt: int
    admission: Admission | None = None  # once it is admitted
    # What its admission says of images.
    images: Admission = field(default_factory=lambda: Admission(0, 0.0, 0))
    length: int = 0  # tokens computed
    prefills: list[tuple[float, float, PrefillChunk]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of its tokens
    finish: str | None = None


@dataclass
class Ledger:
    """Seconds of one step by their cause, as the double computed them."""

    begin: float
    end: float
    costs: dict[int, float]
    stall: float = 0.0


class ScriptedSteps:
    """Runs steps that the test describes, and sends their outputs to the listeners."""

    def __init__(
        self, listeners: list[Callable[[StepOutputs], None]], start: float = 1000.0
    ) -> None:
        self.listeners = listeners
        self.now = start
        self.jobs: dict[int, Job] = {}
        self.ledgers: list[Ledger] = []
        self._number = 0
        self.wait_listener: WaitListener | None = None

    def submit(self, job_id: int, prompt: int) -> Job:
        self.jobs[job_id] = Job(job_id, self.now, prompt)
        return self.jobs[job_id]

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def step(
        self,
        chunks: Mapping[int, int] | None = None,
        decodes: tuple[int, ...] = (),
        *,
        finishes: Mapping[int, str] | None = None,
        stall: float = 0.0,
        waits: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> Ledger:
        """Compute the next `chunks` (tokens by job), and one token of each of `decodes`.

        A chunk that reaches the end of the prompt samples a token. `stall` seconds come on top.
        `waits` are those of StepWaits: idle, longest, total.
        """
        chunks, begin = chunks or {}, self.now
        costs, sampling, prefills = {}, [], []
        for job_id, count in chunks.items():
            job = self.jobs[job_id]
            pairs = sum(job.length + i + 1 for i in range(count))
            costs[job_id] = PREFILL * count + CONTEXT * pairs
            prefills.append(PrefillChunk(job_id, job.length, count))
            job.length += count
            if job.length >= job.prompt + len(job.times):
                sampling.append(job_id)
        for job_id in decodes:
            job = self.jobs[job_id]
            job.length += 1
            costs[job_id] = DECODE + CONTEXT * job.length
            sampling.append(job_id)
        self.now += CONSTANT + sum(costs.values()) + stall
        self._send(begin, prefills, sampling, len(decodes), finishes or {})
        if self.wait_listener is not None:
            self.wait_listener(StepWaits(self._number, *waits))
        ledger = Ledger(begin, self.now, costs, stall)
        self.ledgers.append(ledger)
        return ledger

    def preempt(self, job_id: int) -> None:
        """Forget what is computed of a job; its tokens stay known."""
        self.jobs[job_id].length = 0

    def _send(
        self,
        begin: float,
        prefills: list[PrefillChunk],
        sampling: list[int],
        num_decodes: int,
        finishes: Mapping[int, str],
    ) -> None:
        self._number += 1
        admitted = []
        for chunk in prefills:
            job = self.jobs[chunk.id]
            if job.admission is None:
                job.admission = msgspec.structs.replace(job.images, id=chunk.id, at=begin)
                admitted.append(job.admission)
            job.prefills.append((begin, self.now, chunk))
        tokens = []
        for job_id in sampling:
            self.jobs[job_id].times.append(self.now)
            self.jobs[job_id].finish = finishes.get(job_id)
            tokens.append(TokenOutput(job_id, 7, finishes.get(job_id)))  # type: ignore[arg-type]
        singles = sum(chunk.count == 1 and chunk.id in sampling for chunk in prefills)
        total = sum(chunk.count for chunk in prefills) + num_decodes
        left = [job for job in self.jobs.values() if job.finish is None]
        stats = EngineStats(
            step=self._number,
            running=sum(job.admission is not None for job in left),
            waiting=sum(job.admission is None for job in left),
            step_seconds=self.now - begin,
            step_prefill_tokens=total - num_decodes - singles,
            step_decode_tokens=num_decodes + singles,
        )
        for listen in self.listeners:
            listen(StepOutputs(self.now, tokens, admitted, stats, prefills=prefills))

    def record(self, job: Job, index: int = 0) -> ChoiceRecord:
        """Return what the server knows about a job at its end."""
        return ChoiceRecord(
            id=job.id,
            index=index,
            prompt_tokens=job.prompt,
            num_tokens=len(job.times),
            finish=job.finish,
            submitted=job.submitted,
            admission=job.admission,
            prefills=job.prefills,
            first_token=job.times[0] if job.times else 0.0,
            last_token=job.times[-1] if job.times else 0.0,
            text_end=job.times[-1] if job.finish else 0.0,
        )

    def end(
        self, recorder: Recorder, opened: OpenRequest, *, after: float, error: str | None = None
    ) -> RecordedRequest:
        """End a recorded request `after` seconds from now, and return it."""
        choices = [self.record(self.jobs[id_], place) for place, id_ in enumerate(opened.ids)]
        recorder.end(opened, self.now + after, choices, error)
        return recorder.requests[-1]
