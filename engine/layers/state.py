"""LayerState: the connection between a recurrent layer and the states of the sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import LayerStates
from engine.device.ranks import Ranks
from engine.ops.state_runs import StateRuns
from engine.ops.untouched import untouched_zeros


class StatePart(NamedTuple):
    """One tensor of a layer's state. Ranks may divide its dimension `dim`.

    That consists of `parts`: the size of each, and the number of its equal units that ranks divide.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: the model's
    parts: tuple[tuple[int, int], ...] = ()  # (): one part, with units of size 1
    dim: int = 0


StateSpec = tuple[StatePart, ...]  # what a recurrent layer keeps of a sequence


class LayerState(nn.Module):
    """The state of a recurrent layer, number `index` of those layers. It has no weights.

    Unless it `divides`, each rank keeps the whole state. A layer may have one besides attention; if
    it `replaces_attention`, it is what mixes tokens in a layer.
    """

    def __init__(
        self,
        index: int,
        *parts: StatePart,
        divides: bool = True,
        replaces_attention: bool = True,
    ) -> None:
        super().__init__()
        self.spec: StateSpec = parts
        self.index = index
        self.divides = divides
        self.replaces_attention = replaces_attention

    def divide(self, ranks: Ranks) -> None:
        """Keep this rank's share of each part. Raises ConfigError if that is not possible."""
        if self.divides:
            self.spec = tuple(_divided(part, ranks) for part in self.spec)

    def forward(self, batch: ForwardBatch) -> tuple[LayerStates, StateRuns]:
        """Return the layer's states, each part [slots + 1, *shape], and the step's runs."""
        assert batch.kv.states is not None, "the cache of a model with states has some"
        assert batch.runs is not None, "a step of a model with states has runs"
        return batch.kv.states[self.index], batch.runs


def _divided(part: StatePart, ranks: Ranks) -> StatePart:
    shape = list(part.shape)
    size = shape[part.dim]
    shares = [ranks.units(*each) for each in part.parts or ((size, size),)]
    shape[part.dim] = sum(share.stop - share.start for share in shares)
    return part._replace(shape=tuple(shape))


def state_specs(model: nn.Module) -> list[StateSpec]:
    """Return the specs of a model's recurrent layers, ordered by their `index`."""
    layers = [layer for layer in model.modules() if isinstance(layer, LayerState)]
    layers.sort(key=lambda layer: layer.index)
    indices = [layer.index for layer in layers]
    assert indices == list(range(len(layers))), f"got the indices {indices}, not 0, 1, …"
    return [layer.spec for layer in layers]


def new_states(
    specs: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device
) -> list[LayerStates]:
    """Return the states of all layers in `num_slots` slots, and slot 0; `dtype` is the model's."""
    return [
        tuple(
            untouched_zeros((num_slots + 1, *part.shape), part.dtype or dtype, device)
            for part in spec
        )
        for spec in specs
    ]


def state_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Return the bytes of one slot: a state of every layer."""
    parts = [part for spec in specs for part in spec]
    return sum(math.prod(part.shape) * (part.dtype or dtype).itemsize for part in parts)
