"""LayerState: the connection between a recurrent layer and the states of the sequences."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.state_cache import StatePart, StateSpec
from engine.device.ranks import UNEVEN, Ranks
from engine.errors import ConfigError
from engine.ops.state_runs import StateRuns


class LayerState(nn.Module):
    """The state of a recurrent layer, number `index` of those layers. It has no weights."""

    def __init__(self, index: int, *parts: StatePart) -> None:
        super().__init__()
        self.spec = StateSpec(parts)
        self.index = index

    def divide(self, ranks: Ranks) -> None:
        """Keep this rank's share of each part. Raises ConfigError if that is not possible."""
        parts = []
        for part in self.spec.parts:
            size, *rest = part.shape
            if size % ranks.count:
                raise ConfigError(f"has {size} rows of state, which {ranks.count} {UNEVEN}")
            parts.append(part._replace(shape=(size // ranks.count, *rest)))
        self.spec = replace(self.spec, parts=tuple(parts))

    def forward(self, batch: ForwardBatch) -> tuple[tuple[torch.Tensor, ...], StateRuns]:
        """Return the layer's states, each part [slots + 1, *shape], and the step's runs."""
        assert batch.states is not None, "a step of a model with states has runs"
        return batch.states.cache.layers[self.index], batch.states.runs


def state_specs(model: nn.Module) -> list[StateSpec]:
    """Return the specs of a model's recurrent layers, ordered by their `index`."""
    layers = [layer for layer in model.modules() if isinstance(layer, LayerState)]
    layers.sort(key=lambda layer: layer.index)
    indices = [layer.index for layer in layers]
    assert indices == list(range(len(layers))), f"got the indices {indices}, not 0, 1, …"
    return [layer.spec for layer in layers]
