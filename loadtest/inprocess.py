"""The engine in this process, without HTTP, for comparison with the figures of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from engine.assembly import make_core
from engine.config import EngineConfig
from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import Abort, GenerateRequest, SamplingParams
from engine.protocol.message import Message
from engine.protocol.outputs import Rejected, StepOutputs
from engine.protocol.wire import ToEngine
from engine.runner.load import load_engine

WARM_UP = 8  # steps
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Work:
    """One request: its prompt and the exact number of output tokens."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0


class Engine:
    """An engine that is loaded once and then driven turn by turn, like the engine process."""

    def __init__(self, config: EngineConfig, depth: int | None = None) -> None:
        """`depth` is that of EngineCore; None selects the device's default."""
        self.loaded = load_engine(config)
        self.runner = self.loaded.runner
        if depth is None:
            depth = 1 if self.runner.device.type == "cuda" else 0
        self.core = make_core(config, self.loaded, self, depth=depth)
        self.steps: list[float] = []  # when each step was retired, CLOCK_MONOTONIC
        self._inbox: list[ToEngine] = []
        self._ids = 0
        self._begun: set[int] = set()

    def drain(self, *, block: bool) -> list[ToEngine]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: Message) -> None:
        if isinstance(message, Rejected):
            raise RuntimeError(f"the engine refused a request: {message.message}")
        if isinstance(message, StepOutputs):
            self.steps.append(message.at)
            self._begun.update(output.id for output in message.tokens)

    def settle(self) -> None:
        """Capture all remaining graphs now, which a server does while it is idle."""
        while self.runner.capture_when_idle():
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
        """Run all of `works`, submitted at once, and return the wall seconds."""
        began = time.monotonic()
        self.submit(works)
        while self.busy:
            self.core.turn()
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - began

    def embed(self, texts: Sequence[Sequence[int]]) -> float:
        """Embed texts of token ids, submitted at once, and return the wall seconds."""
        began = time.monotonic()
        for tokens in texts:
            self._ids += 1
            self._inbox.append(EmbedRequest(self._ids, list(tokens), began))
        while self.busy:
            self.core.turn()
        return time.monotonic() - began

    def decode_seconds(self, works: Sequence[Work], steps: int) -> list[float]:
        """Return the seconds of each of `steps` decode steps in which all of `works` run."""
        ids = self._begin(works, WARM_UP)
        self.steps.clear()
        while len(self.steps) <= steps:
            self.core.turn()
        times = self.steps[: steps + 1]
        self.abort(ids)
        return [b - a for a, b in pairwise(times)]

    def while_decoding(
        self,
        works: Sequence[Work],
        steps: int,
        measure: Callable[[Callable[[], None]], Found],
        warm_up: int = WARM_UP,
    ) -> Found:
        """Return what `measure` returns; it gets a function that launches `steps` decode steps.

        All of `works` run in each step, and in `warm_up` steps before.
        """
        ids = self._begin(works, warm_up)

        def run() -> None:
            for _ in range(steps):
                self.core.turn()

        found = measure(run)
        self.abort(ids)
        return found

    def _begin(self, works: Sequence[Work], warm_up: int) -> list[int]:
        """Submit `works`, run until all of them have decoded `warm_up` steps; return their ids."""
        ids = self.submit(works)
        self._begun.clear()
        while not self._begun.issuperset(ids):
            self.core.turn()
        for _ in range(warm_up):
            self.core.turn()
        return ids

    def abort(self, ids: list[int]) -> None:
        """Abort these requests, and run until no work is left."""
        self._inbox.append(Abort(ids))
        while self.busy:
            self.core.turn()

    @property
    def busy(self) -> bool:
        return bool(self._inbox or self.core.scheduler.has_work or self.core.in_flight)
