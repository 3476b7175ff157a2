"""Shared by all workers. A worker is a script that runs a library in the library's environment.

It reads lines of JSON from stdin and answers each with a line of JSON on stdout. The first line is
a Setup; its answer, {}, says that the model is loaded. Each later line is a WorkerJob; its answer
has the fields of Times. The library's own output goes to stderr.

This file is imported in environments without Penstock's packages, so it needs only Python.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setup:
    model: str  # path
    streams: int  # the most of all jobs


@dataclass(frozen=True)
class WorkerJob:
    prompts: list[Any]  # each a list of token ids, or a text
    new: int
    streams: int
    arrivals: list[float]  # seconds; empty for a closed loop


@dataclass
class Times:
    """One entry for each request that ended, in any order. Seconds are of CLOCK_MONOTONIC."""

    wall: float = 0.0
    started: list[float] = field(default_factory=list)  # in an open loop, the intended arrival
    arrivals: list[list[float]] = field(default_factory=list)  # of each event with tokens
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)

    def add(self, started: float, arrivals: list[float], tokens: int, prompt_tokens: int) -> None:
        self.started.append(started)
        self.arrivals.append(arrivals)
        self.tokens.append(tokens)
        self.prompt_tokens.append(prompt_tokens)


Measure = Callable[[WorkerJob], Times]


def work(load: Callable[[Setup], Measure]) -> None:
    """Load the model with `load`, and answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's own output goes to stderr

    def answer(message: object) -> None:
        print(json.dumps(message), file=answers, flush=True)

    measure = load(Setup(**json.loads(sys.stdin.readline())))
    answer({})
    for line in sys.stdin:
        job = WorkerJob(**json.loads(line))
        began = time.monotonic()
        times = measure(job)
        times.wall = time.monotonic() - began
        answer(asdict(times))
