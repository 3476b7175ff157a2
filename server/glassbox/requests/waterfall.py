"""The waterfall of one request: its wall time in parts that sum to it exactly, to the microsecond.

- `server`: in the API process, before the submission and after the last token
- `queue`: in the engine, while no step computed anything of the request
- `encoder`: the image encoder worked on its images
- `base`: the constant of the steps that computed something of it
- `own`: its own tokens in these steps
- `others`: the tokens of other requests in these steps
- `waiting`: threads of the engine waited for a core, in these steps and before the first one
- `unexplained`: the rest, where the steps took longer (or less, if negative) than the model says
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from server.glassbox.requests.step_log import RecordedRequest, RecordedStep
from server.glassbox.requests.step_model import (
    Floats,
    Members,
    StepModel,
    durations,
    members_of,
    waits_of,
)

Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool]]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The time that another request cost this one."""

    id: int  # the engine's; GONE for sequences that left during a step
    others_us: int  # of the part "others"
    queue_us: int  # of the part "queue": its share of the steps that ran meanwhile
    prompt_tokens: int | None  # from its chunks that were seen; None: none was
    num_decodes: int  # its decodes in the steps of this request and while this one waited


@dataclass(frozen=True, slots=True)
class StepShare:
    """One step of the waterfall. Seconds; the shares sum to the time within the request's."""

    step: RecordedStep
    begin: float  # where the step, or the request in the engine, begins
    end: float
    is_queue: bool  # the step computed nothing of the request
    base: float
    own: float
    others: float
    waiting: float
    unexplained: float


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Where the wall time of a request went. `parts` are microseconds, in the order above."""

    wall_us: int
    parts: dict[str, int]
    neighbours: Sequence[Neighbour]  # those that cost the most first
    steps: Sequence[StepShare]
    members: Members  # of `steps`
    costs: Floats  # seconds by the model, of `members`
    submitted: float  # CLOCK_MONOTONIC seconds
    engine_end: float  # when the engine's work for the request ended


def waterfall_of(
    request: RecordedRequest, steps: Sequence[RecordedStep], model: StepModel
) -> Waterfall:
    """Return the waterfall of a request. `steps` are those that the recorder has of it."""
    submitted = min(choice.submitted for choice in request.choices)
    engine_end = request.ended
    if all(choice.finish is not None for choice in request.choices):
        engine_end = max(choice.last_token for choice in request.choices)
    kept = [step for step in steps if step.end > submitted and step.begin < engine_end]
    begins = np.array([max(step.begin, submitted) for step in kept], np.float64)
    ends = np.array([min(step.end, engine_end) for step in kept], np.float64)
    split = _Split(request, kept, begins, ends, model)
    idle = _waited_without_steps(request, submitted, begins, ends)
    idle_waiting = min(idle, split.idle_wait)
    idle -= idle_waiting
    encoder = min(_encode_seconds(request), idle + split.queue_seconds)
    # Units run between steps, also of other requests, whose steps then take longer.
    split.take_from_queue(max(encoder - idle, 0.0))
    queue_us = _us(split.queue_seconds + max(idle - encoder, 0.0))
    others, queued = split.by_request(split.shared), split.by_request(split.queued)
    decodes = split.by_request(split.members.decode)
    neighbours = [
        Neighbour(
            id=other,
            others_us=_us(others.get(other, 0.0)),
            queue_us=_us(queued.get(other, 0.0)),
            prompt_tokens=split.prompt_tokens.get(other),
            num_decodes=int(decodes.get(other, 0)),
        )
        for other in sorted(others.keys() | queued.keys())
    ]
    neighbours.sort(key=lambda one: one.others_us + one.queue_us, reverse=True)
    wall_us = _us(request.ended - request.opened.arrival)
    parts = {
        "server": _us(submitted - request.opened.arrival) + _us(request.ended - engine_end),
        "queue": queue_us,
        "encoder": _us(encoder),
        "base": _us(float(split.base.sum())),
        "own": _us(float(split.own.sum())),
        "others": sum(one.others_us for one in neighbours),
        "waiting": _us(float(split.waiting.sum()) + idle_waiting),
    }
    parts["unexplained"] = wall_us - sum(parts.values())
    return Waterfall(
        wall_us=wall_us,
        parts=parts,
        neighbours=neighbours,
        steps=split.shares(),
        members=split.members,
        costs=split.costs,
        submitted=submitted,
        engine_end=engine_end,
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _encode_seconds(request: RecordedRequest) -> float:
    """Return the seconds that the image encoder worked for all choices of a request."""
    admissions = [choice.admission for choice in request.choices]
    return sum(one.encode_seconds for one in admissions if one is not None)


def _waited_without_steps(
    request: RecordedRequest, submitted: float, begins: Floats, ends: Floats
) -> float:
    """Return the seconds before the request's admission in which no step ran."""
    admissions = [c.admitted for c in request.choices if c.admitted is not None]
    admitted = min(admissions, default=request.ended)
    covered = np.maximum(np.minimum(ends, admitted) - begins, 0.0).sum()
    return max(0.0, admitted - submitted - float(covered))


class _Split:
    """The steps of a request, split by the model. All arrays are in seconds."""

    def __init__(
        self,
        request: RecordedRequest,
        steps: Sequence[RecordedStep],
        begins: Floats,
        ends: Floats,
        model: StepModel,
    ) -> None:
        self._steps, self._begins, self._ends = steps, begins, ends
        self.prompt_tokens: dict[int, int] = {}  # known ones, by request
        for step in steps:
            for chunk in step.chunks:
                known = self.prompt_tokens.get(chunk.id, 0)
                self.prompt_tokens[chunk.id] = max(known, chunk.start + chunk.count)
        self.members = members = members_of(steps)
        self.costs = members.cost(model)
        count = len(steps)
        self._within = ends - begins  # the part of the step that is within the request's time
        # A step that began before the request was submitted counts for its part.
        share = self._within / durations(steps)
        is_own = np.isin(members.id, request.opened.ids)
        self._is_queue: Bools = np.bincount(members.step, is_own, count) == 0
        runs = ~self._is_queue
        first = np.flatnonzero(runs)[:1]
        self.idle_wait = sum(steps[place].idle_wait for place in first.tolist())
        self.queue_seconds = float(self._within[self._is_queue].sum())
        self.base = runs * share * model.constant
        self.own = share * np.bincount(members.step, self.costs * is_own, count)
        in_run = ~is_own & runs[members.step]
        in_queue = self._is_queue[members.step]
        self.shared: Floats = self.costs * share[members.step] * in_run
        self.queued: Floats = _shares(members, self.costs, count) * self._within[members.step]
        self.queued = self.queued * in_queue
        self._others = np.bincount(members.step, self.shared, count)
        explained = self.base + self.own + self._others
        self.waiting: Floats = runs * share * waits_of(steps, (self._within - explained) / share)

    def take_from_queue(self, seconds: float) -> None:
        """Take time out of the steps in which the request waited, in the share of each."""
        if seconds:
            left = self.queue_seconds - seconds
            self.queued = self.queued * (left / self.queue_seconds)
            self.queue_seconds = left

    def by_request(self, amounts: np.typing.ArrayLike) -> dict[int, float]:
        """Return the sum of `amounts`, one for each member, by request. Leaves out zeros."""
        ids, places = np.unique(self.members.id, return_inverse=True)
        sums = np.bincount(places, amounts, len(ids))
        pairs = zip(ids.tolist(), sums.tolist(), strict=True)
        return {request_id: total for request_id, total in pairs if total > 0}

    def shares(self) -> list[StepShare]:
        runs = ~self._is_queue
        explained = self.base + self.own + self._others + self.waiting
        unexplained = runs * (self._within - explained)
        parts = [self.base, self.own, self._others, self.waiting, unexplained]
        return [
            StepShare(step, *times, is_queue, *seconds)
            for step, times, is_queue, seconds in zip(
                self._steps,
                zip(self._begins.tolist(), self._ends.tolist(), strict=True),
                self._is_queue.tolist(),
                np.stack(parts, 1).tolist(),
                strict=True,
            )
        ]


def _shares(members: Members, costs: Floats, count: int) -> Floats:
    """Return the share of each member in its step, from 0 to 1.

    In a step without costs by the model, tokens are counted.
    """
    total = np.bincount(members.step, costs, count)
    tokens = members.prefill + members.decode
    all_tokens = np.bincount(members.step, tokens, count)
    has_costs = total[members.step] > 0
    by_cost = costs / np.where(total > 0, total, 1.0)[members.step]
    by_token = tokens / np.maximum(all_tokens, 1)[members.step]
    shares: Floats = np.where(has_costs, by_cost, by_token)
    return shares
