"""StateTraces: what the recurrent layers of a model keep behind each token of a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.attention.kv_cache import LayerStates
from engine.layers.state import LayerState
from engine.ops.state_observer import StateObserver
from engine.protocol.lens import MAX_STATE_BYTES, StateTrace

ARRAYS = 3  # norms, strengths and decays


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A layer with a state. The last part of a state is traced."""

    number: int | None  # in the model; None: before the first layer
    index: int  # among those with a state
    heads: int

    def trace_bytes(self, tokens: int) -> int:
        """Return the most bytes that its StateTrace takes."""
        return ARRAYS * 4 * self.heads * tokens


def recurrent_layers(model: nn.Module) -> list[RecurrentLayer]:
    """Return the layers that keep a state, ordered by their index."""
    found = [
        RecurrentLayer(_number(name), layer.index, _heads(layer))
        for name, layer in model.named_modules()
        if isinstance(layer, LayerState)
    ]
    return sorted(found, key=lambda layer: layer.index)


def _number(name: str) -> int | None:
    """Return the number of the layer that a module belongs to: "blocks.3.recurrent.state" has 3."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _heads(layer: LayerState) -> int:
    """Return the heads of a state [heads, K, V]. The inputs of a convolution [W - 1, C] are one."""
    first, *rest = layer.spec[-1].shape
    return first if len(rest) > 1 else 1


def traced_layers(
    layers: Sequence[RecurrentLayer], tokens: int, wanted: Collection[int] | None
) -> list[RecurrentLayer] | None:
    """Return the layers whose traces are kept; None if those `wanted` are too large.

    Without `wanted` these are all layers, or none if they are too large together. A state before
    the first layer has no number that could be wanted, so it is one of them.
    """
    kept = [
        layer
        for layer in layers
        if wanted is None or layer.number is None or layer.number in wanted
    ]
    if sum(layer.trace_bytes(tokens) for layer in kept) <= MAX_STATE_BYTES:
        return kept
    return [] if wanted is None else None


class StateTraces:
    """The traces of the layers `kept`, of one text.

    `states` are the tensors of all layers that the lens gives to the model.
    """

    def __init__(self, kept: Collection[RecurrentLayer], states: Sequence[LayerStates]) -> None:
        self._kept = kept
        self._states = [parts[-1] for parts in states]
        self.observer = StateObserver(self._states[layer.index] for layer in kept)

    def of_text(self, layers: Sequence[RecurrentLayer], count: int) -> list[StateTrace]:
        """Return the traces of layers behind the first `count` tokens; the rest is padding."""
        return [self._trace(layer, count) for layer in layers]

    def _trace(self, layer: RecurrentLayer, count: int) -> StateTrace:
        if layer not in self._kept:
            return StateTrace(layer.number, layer.heads, b"")
        found = self.observer.of(self._states[layer.index])
        arrays = found.norms, found.strengths, found.decays
        return StateTrace(layer.number, layer.heads, *(_bytes(array[:count]) for array in arrays))


def _bytes(tokens: Sequence[torch.Tensor]) -> bytes:
    """Return tensors [heads] of each token as [heads, tokens]."""
    if not tokens:
        return b""
    values: bytes = torch.stack(list(tokens), dim=1).cpu().numpy().astype("<f4").tobytes()
    return values
