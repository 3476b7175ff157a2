"""Attention weights as maps, rows and thumbnails."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.lens_messages import AttentionWeights

THUMB = 32  # most rows and columns of a thumbnail

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def floats(data: bytes) -> Floats:
    return np.frombuffer(data, np.float32)


def head_map(layer: AttentionWeights, head: int) -> Floats:
    """Return the weights of a head, [queries, keys]."""
    weights: Floats = floats(layer.weights).reshape(layer.heads, -1)[head]
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


def head_row(layer: AttentionWeights, head: int, row: int) -> dict[str, list[float]]:
    """Return the weights of one query, and its scores before and after a softcap.

    Only visible keys are listed: in a decoder those up to the query.
    """
    start, end = row * layer.keys, (row + 1) * layer.keys
    if layer.stack == "decoder":
        start, end = row * (row + 1) // 2, (row + 1) * (row + 2) // 2
    found = {"weights": floats(layer.weights).reshape(layer.heads, -1)[head, start:end].tolist()}
    if layer.softcap is not None:
        scores = floats(layer.scores).reshape(layer.heads, -1)[head, start:end].astype(np.float64)
        found["scores"] = scores.tolist()
        found["capped"] = (layer.softcap * np.tanh(scores / layer.softcap)).tolist()
    return found


def thumbnail(weights: Floats) -> Bytes:
    """Return the shades of a map in at most THUMB rows and columns: the largest of each cell."""
    for axis, size in enumerate(weights.shape):
        if size > THUMB:
            starts = np.arange(THUMB) * size // THUMB
            weights = np.maximum.reduceat(weights, starts, axis=axis)
    return shades(weights)


def flatness(layer: AttentionWeights, weights: Floats) -> float:
    """Return the mean entropy of a head's rows, each divided by that of equal weights.

    1: every key weighs the same; 0: one key has all the weight. Queries that see one key do not
    count. Without others it is 0.
    """
    queries = np.arange(layer.queries)
    visible = np.full(layer.queries, layer.keys)
    if layer.stack == "decoder":
        visible = np.minimum(queries + 1, layer.window or layer.keys)
    several = visible > 1
    if not several.any():
        return 0.0
    rows = weights[several].astype(np.float64)
    logs = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
    entropies = -(rows * logs).sum(axis=1) / np.log(visible[several])
    return float(entropies.mean())
