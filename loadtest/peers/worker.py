"""Shared by all workers. A worker is a script that runs a library in the library's environment.

It reads a job as JSON from stdin: `model` (path), `prompts` (token ids or texts), `warm` (prompts
of the warm-up), `new`, `streams`, and `arrivals` (seconds; empty for a closed loop). It prints one
line of JSON: the fields of Times, `ready` (CLOCK_MONOTONIC) and `resident` (MB).

This file is imported in environments without Penstock's packages, so it needs only Python.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WARM_NEW = 8  # tokens of a warm-up's answers


@dataclass(frozen=True)
class WorkerJob:
    model: str
    prompts: list[Any]  # each a list of token ids, or a text
    warm: list[Any]
    new: int
    streams: int
    arrivals: list[float]

    def warm_up(self) -> WorkerJob:
        return WorkerJob(self.model, self.warm, [], WARM_NEW, self.streams, [])


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


def work(load: Callable[[WorkerJob], Measure]) -> None:
    """Read a job, load the model with `load`, warm it up, measure, and print the result."""
    job = WorkerJob(**json.load(sys.stdin))
    measure = load(job)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    state = {"ready": time.monotonic(), "resident": pages * resource.getpagesize() / 1e6}
    measure(job.warm_up())
    began = time.monotonic()
    times = measure(job)
    times.wall = time.monotonic() - began
    print(json.dumps(asdict(times) | state))
