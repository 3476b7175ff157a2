"""The facts about one choice of a request: integers and times, no text.

Traces, the recorder and the waterfall are all made from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.protocol.outputs import Admission, PrefillChunk


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """One choice when its request ended. Times are CLOCK_MONOTONIC seconds."""

    id: int  # of the engine's request
    index: int  # among the choices of the HTTP request
    prompt_tokens: int
    num_tokens: int  # generated
    finish: str | None  # None: it was aborted
    submitted: float
    admission: Admission | None  # None: it never left the queue
    prefills: Sequence[tuple[float, float, PrefillChunk]]  # begin and end of the step, chunk
    first_token: float  # 0.0: not reached, as for the next two
    last_token: float
    text_end: float

    @property
    def cached_tokens(self) -> int:
        """Those of the prompt; 0 until it is admitted."""
        return 0 if self.admission is None else self.admission.cached_tokens

    @property
    def admitted(self) -> float | None:
        """The launch of the first step; None: it never left the queue."""
        return None if self.admission is None else self.admission.at

    @property
    def num_preemptions(self) -> int:
        return num_preemptions([chunk for _, _, chunk in self.prefills])


def num_preemptions(chunks: Sequence[PrefillChunk]) -> int:
    """Return how often a sequence was preempted: how often its prefill began again.

    A preemption after which the cache still holds all tokens is not counted.
    """
    return sum(chunk.start != last.start + last.count for last, chunk in pairwise(chunks))
