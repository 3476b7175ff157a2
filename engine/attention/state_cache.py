"""StateCache: the states of recurrent layers, which keep them in place of keys and values.

A state has a fixed size, however long its sequence. A slot holds one state of every layer: that of
a running sequence behind its last token, or a snapshot at a block edge. The scheduler decides which
(engine/scheduling/state_slots.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine.attention.untouched import untouched_zeros
from engine.ops.state_runs import StateRuns


class StatePart(NamedTuple):
    """One tensor of a layer's state. Ranks divide its first dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: the model's


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent layer keeps of a sequence, declared in the model's file."""

    parts: tuple[StatePart, ...]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one state in a model of this dtype."""
        sizes = ((math.prod(part.shape), part.dtype or dtype) for part in self.parts)
        return sum(count * kept.itemsize for count, kept in sizes)


class StateCache:
    """The states of all recurrent layers in `num_slots` slots, and the zeros of slot 0."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype` is that of the model."""
        self.num_slots = num_slots
        self.dtype = dtype
        # Of each layer, by its index: its parts, each [num_slots + 1, *shape].
        self.layers = [
            tuple(
                untouched_zeros((num_slots + 1, *part.shape), part.dtype or dtype, device)
                for part in spec.parts
            )
            for spec in specs
        ]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer)


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of all recurrent layers, and which of them a step reads and writes."""

    cache: StateCache
    runs: StateRuns

    def padded(self, missing: int) -> StepStates:
        """Return it with `missing` tokens of padding, which read and write nothing."""
        writes = torch.nn.functional.pad(self.runs.writes, (0, missing))
        return replace(self, runs=replace(self.runs, writes=writes))


def whole_text(cache: StateCache, count: int, device: torch.device) -> StepStates:
    """Return the states of one text of `count` tokens, none of which is kept."""
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    starts = torch.tensor([0, count], device=device)
    return StepStates(cache, StateRuns(starts, zeros[:1], zeros))


def state_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Return the bytes of one slot: a state of every layer."""
    return sum(spec.num_bytes(dtype) for spec in specs)
