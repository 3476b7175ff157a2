"""Attention weights as maps, rows and arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.protocol.lens import AttentionWeights

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def floats(data: bytes) -> Floats:
    return np.frombuffer(data, np.float32)


def _of_head(layer: AttentionWeights, data: bytes, head: int | None) -> Floats:
    """Return the weights, or scores, in `data` of a head, or with None their mean over all."""
    heads = floats(data).reshape(layer.heads, -1)
    found: Floats = heads.mean(0) if head is None else heads[head]
    return found


def head_map(layer: AttentionWeights, head: int | None) -> Floats:
    """Return the weights of a head, [queries, keys]; with None the mean of all heads."""
    weights = _of_head(layer, layer.weights, head)
    if layer.stack != "decoder":
        whole_rows: Floats = weights.reshape(layer.queries, layer.keys)
        return whole_rows
    whole = np.zeros((layer.queries, layer.keys), np.float32)
    whole[np.tri(layer.queries, dtype=bool)] = weights
    return whole


def shades(weights: Floats) -> Bytes:
    """Return round(255 sqrt(w)): small weights stay visible."""
    found: Bytes = np.rint(255 * np.sqrt(weights)).astype(np.uint8)
    return found


def head_row(layer: AttentionWeights, head: int | None, row: int) -> dict[str, list[float]]:
    """Return the weights of one query, and its scores before and after a softcap.

    Only visible keys are listed: in a decoder those up to the query. With None for the head, they
    are means of all heads, without scores.
    """
    start, end = row * layer.keys, (row + 1) * layer.keys
    if layer.stack == "decoder":
        start, end = row * (row + 1) // 2, (row + 1) * (row + 2) // 2
    found = {"weights": _of_head(layer, layer.weights, head)[start:end].tolist()}
    if layer.softcap is not None and head is not None:
        scores = _of_head(layer, layer.scores, head)[start:end].astype(np.float64)
        found["scores"] = scores.tolist()
        found["capped"] = (layer.softcap * np.tanh(scores / layer.softcap)).tolist()
    return found


def stacked(layers: Sequence[AttentionWeights]) -> Floats:
    """Return the weights of some layers with equally many heads, [layers, heads, queries, keys].

    Keys that a query does not see have weight 0.
    """
    first = layers[0]
    whole = np.zeros((len(layers), first.heads, first.queries, first.keys), np.float32)
    for place, layer in enumerate(layers):
        for head in range(layer.heads):
            whole[place, head] = head_map(layer, head)
    return whole
