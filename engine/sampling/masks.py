"""The token masks of a step, and what the runner asks of the grammars of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from engine.device.transfer import to_device
from engine.scheduling.speculation import Grammars
from engine.scheduling.step import SampledToken, ScheduledSlice, Step


class TokenMasks(NamedTuple):
    """The allowed tokens of some of a step's sampling slices."""

    slices: list[int]  # K indices
    words: torch.Tensor  # [K, ceil(V / 32)] int32, one bit per token, the lowest bit first
    broken: frozenset[int]  # indices whose grammar cannot go on: only an end token is allowed

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `slices` and `words` on the device."""
        (rows,) = to_device([self.slices], device)
        words = self.words
        if device.type == "cuda":
            words = words.pin_memory().to(device, non_blocking=True)
        return rows, words


class LaunchedStep(Protocol):
    """A step whose tokens may not be on the host yet."""

    step: Step

    def wait(self) -> list[SampledToken]: ...


class LazyMasks:
    """Masks that are computed when they are needed: after the model has been launched."""

    def __init__(self, compute: Callable[[], TokenMasks]) -> None:
        self._compute = compute
        self._masks: TokenMasks | None = None

    def result(self) -> TokenMasks:
        if self._masks is None:
            self._masks = self._compute()
        return self._masks


class SequenceGrammars(Grammars, Protocol):
    """The grammars of all constrained sequences: `engine/grammar/matchers.py`."""

    def start(self, sampling: Sequence[ScheduledSlice]) -> LazyMasks | None: ...

    def launched(self, pending: LaunchedStep) -> None: ...

    def accept(self, step: Step, sampled: Iterable[SampledToken]) -> None: ...

    def replay(
        self, request_id: int, answer: Sequence[int], indices: range
    ) -> torch.Tensor | None: ...
