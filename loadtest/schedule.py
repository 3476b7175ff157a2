"""A workload as a timetable: which prompt of token ids is sent when, the same for all who run it.

The simulator and the measurement it is held against take the same timetable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from loadtest.workload import Shape, Workload, poisson

DEMO_VOCABULARY = range(300, 2000)  # of the demo model, without special tokens


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: seconds after the beginning, ids of the prompt, tokens of the answer."""

    at: float
    prompt: list[int]
    output_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        """For /v1/completions."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def token_ids(shape: Shape, vocabulary: range, rng: random.Random) -> list[int]:
    """Equal names of blocks are equal ids; what no block names is drawn from `rng`."""
    ids: list[int] = []
    for block in shape.blocks:
        size = round(shape.block_tokens)
        ids += random.Random(block).choices(vocabulary, k=size)
    ids += rng.choices(vocabulary, k=max(0, shape.prompt_tokens - len(ids)))
    return ids[: shape.prompt_tokens]


def asks(workload: Workload, vocabulary: range, seed: int) -> Iterator[Ask]:
    """Requests without end, all of them due at once."""
    rng = random.Random(seed)
    for shape in workload.shapes(rng):
        yield Ask(0.0, token_ids(shape, vocabulary, rng), shape.output_tokens)


def timetable(
    workload: Workload, rate: float, seconds: float, vocabulary: range, seed: int
) -> list[Ask]:
    """Arrivals as a Poisson process of `rate` requests/s, for so many seconds."""
    at, gaps = 0.0, poisson(random.Random(f"arrivals {seed}"))
    found: list[Ask] = []
    for ask in asks(workload, vocabulary, seed):
        at += next(gaps) / rate
        if at >= seconds:
            return found
        found.append(replace(ask, at=at))
    raise AssertionError("a workload never ends")
