"""Timings: where the time of one request went, from the same stamps as its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol.outputs import Admission
from server.generation.events import Timings, Usage


@dataclass(slots=True)
class Timeline:
    """When the tokens of one choice came, in CLOCK_MONOTONIC seconds. 0.0: not yet.

    The engine stamps the tokens; the API process stamps the end of the text.
    """

    first_token: float = 0.0
    last_token: float = 0.0
    text_end: float = 0.0

    def add_token(self, at: float) -> None:
        self.first_token = self.first_token or at
        self.last_token = at


def timings_of(
    submitted: float,
    admissions: Sequence[Admission],
    timelines: Sequence[Timeline],
    usage: Usage,
) -> Timings:
    """Return the timings of a request so far, over all its choices.

    `submitted` is in CLOCK_MONOTONIC seconds; `admissions` are those of the choices that have left
    the queue.
    """
    begun = [timeline for timeline in timelines if timeline.first_token]
    admitted = min([admission.at for admission in admissions], default=submitted)
    first = min([timeline.first_token for timeline in begun], default=admitted)
    last = max([timeline.last_token for timeline in begun], default=first)
    return Timings(
        queue_ms=1000 * max(admitted - submitted, 0.0),
        cached_tokens=usage.cached_tokens,
        prompt_tokens=usage.prompt_tokens - usage.cached_tokens,
        prompt_ms=1000 * max(first - admitted, 0.0),
        generated_tokens=usage.completion_tokens,
        generation_ms=1000 * (last - first),
        timed_tokens=max(usage.completion_tokens - len(begun), 0),
    )
