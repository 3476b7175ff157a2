"""The engine in this process, without HTTP: what a figure of the server is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import (
    Abort,
    FromEngine,
    GenerateRequest,
    Rejected,
    SamplingParams,
    StepOutputs,
    ToEngine,
)
from engine.runner.model_runner import ModelRunner

WARM_UP = 8  # steps


@dataclass(frozen=True, slots=True)
class Work:
    """One request: its prompt and how many tokens are wanted, no more and no fewer."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0


class Engine:
    """Loaded once, then driven turn by turn as the engine process does it."""

    def __init__(self, config: EngineConfig, depth: int | None = None) -> None:
        """`depth` as of EngineCore; None: the device's own."""
        self.runner = ModelRunner(config)
        if depth is None:
            depth = 1 if self.runner.device.type == "cuda" else 0
        self.core = EngineCore(config, self.runner, self, depth=depth)
        self.steps: list[float] = []  # when each step was retired, CLOCK_MONOTONIC
        self._inbox: list[ToEngine] = []
        self._ids = 0
        self._begun: set[int] = set()

    def drain(self, *, block: bool) -> list[ToEngine]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Rejected):
            raise RuntimeError(f"the engine refused a request: {message.message}")
        if isinstance(message, StepOutputs):
            self.steps.append(message.at)
            self._begun.update(output.id for output in message.tokens)

    def settle(self) -> None:
        """What idle turns of a server do by and by: record the steps that are not yet."""
        while self.runner.improve():
            pass

    def submit(self, works: Sequence[Work]) -> list[int]:
        first = self._ids + 1
        for work in works:
            self._ids += 1
            params = SamplingParams(work.max_tokens, temperature=work.temperature, seed=self._ids)
            self._inbox.append(
                GenerateRequest(self._ids, list(work.prompt), params, time.monotonic())
            )
        return list(range(first, self._ids + 1))

    def generate(self, works: Sequence[Work]) -> float:
        """Wall seconds for all of them, given at once."""
        began = time.monotonic()
        self.submit(works)
        while self.busy:
            self.core.turn()
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - began

    def decode_seconds(self, works: Sequence[Work], steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps with all of `works` running and none waiting."""
        ids = self.submit(works)
        self._begun.clear()
        while not self._begun.issuperset(ids):
            self.core.turn()
        for _ in range(WARM_UP):
            self.core.turn()
        self.steps.clear()
        while len(self.steps) <= steps:
            self.core.turn()
        times = self.steps[: steps + 1]
        self._inbox.append(Abort(ids))
        while self.busy:
            self.core.turn()
        return [b - a for a, b in pairwise(times)]

    @property
    def busy(self) -> bool:
        return bool(self._inbox or self.core.scheduler.has_work or self.core.in_flight)
