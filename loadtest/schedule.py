"""A workload as a timetable: prompts of token ids with arrival times, the same in every run.

The simulator and the measurement it is compared with use the same timetable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from loadtest.workload import Shape, Workload, poisson

DEMO_VOCABULARY = range(300, 2000)  # token ids of the demo model without special tokens
# An answer that goes on after its end may repeat special tokens. Without text they make no event.
FULL_LENGTH = {"ignore_eos": True, "skip_special_tokens": False}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its arrival in seconds, its prompt's token ids, its number of output tokens."""

    at: float
    prompt: list[int]
    output_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        """The body of a request to /v1/completions."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            **FULL_LENGTH,
        }


def token_ids(shape: Shape, vocabulary: range, rng: random.Random) -> list[int]:
    """Return the prompt of `shape`. Equal block names give equal ids; `rng` draws the rest."""
    ids: list[int] = []
    for block in shape.blocks:
        size = round(shape.block_tokens)
        ids += random.Random(block).choices(vocabulary, k=size)
    ids += rng.choices(vocabulary, k=max(0, shape.prompt_tokens - len(ids)))
    return ids[: shape.prompt_tokens]


def asks(workload: Workload, vocabulary: range, seed: int) -> Iterator[Ask]:
    """Yield requests without end, all with arrival time 0."""
    rng = random.Random(seed)
    for shape in workload.shapes(rng):
        yield Ask(0.0, token_ids(shape, vocabulary, rng), shape.output_tokens)


def timetable(
    workload: Workload, rate: float, seconds: float, vocabulary: range, seed: int
) -> list[Ask]:
    """Return requests that arrive as a Poisson process of `rate` requests/s, for `seconds`."""
    at, gaps = 0.0, poisson(random.Random(f"arrivals {seed}"))
    found: list[Ask] = []
    for ask in asks(workload, vocabulary, seed):
        at += next(gaps) / rate
        if at >= seconds:
            return found
        found.append(replace(ask, at=at))
    raise AssertionError("a workload never ends")
