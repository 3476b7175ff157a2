"""Ablation: parts of a decoder that are switched off for one request."""

from __future__ import annotations

from engine.message import Record


class Ablation(Record, frozen=True):
    """Attention heads and layers that add nothing to the residual stream of a request's tokens.

    A head's output is zero before the output projection, whose bias stays. A layer adds neither its
    attention nor its MLP. Layers and heads are counted from 0. An encoder stays as it is.
    """

    heads: tuple[tuple[int, int], ...] = ()  # (layer, head)
    layers: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, ...]:
        """Numbers that differ for different ablations, below -1 at first: no token id is."""
        heads = [number for pair in sorted(set(self.heads)) for number in pair]
        return (-2, len(heads), *heads, *sorted(set(self.layers)))
