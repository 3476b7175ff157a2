"""Shares of the models in a merged tensor, by merge method.

Every method sums the models' tensors, each multiplied by its share. Only the shares differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PARALLEL = 0.9995  # mergekit's bound: above it the arc and its chord agree to one part in 10^4


def linear(weights: Sequence[float], *, normalize: bool) -> list[float]:
    """Return the shares of a weighted mean ("model soups", arXiv 2203.05482).

    Without `normalize` they are the shares of a weighted sum.
    """
    total = sum(weights) if normalize else 1.0
    return [weight / total for weight in weights]


def ema(count: int, decay: float) -> list[float]:
    """Return the shares of an exponential moving average over checkpoints in training order.

    The average starts as the first checkpoint. Each later checkpoint c updates it to
    decay · average + (1 - decay) · c.
    """
    later = [(1 - decay) * decay**age for age in reversed(range(count - 1))]
    return [decay ** (count - 1), *later]


def liti(t: float) -> list[float]:
    """Return the shares of an interpolation from the initial (t = 0) to the tuned model (t = 1).

    Source: arXiv 2406.16768, section 3.
    """
    return [1 - t, t]


def slerp(t: float, dot: float, norms: tuple[float, float]) -> list[float]:
    """Return the shares of spherical interpolation (Shoemake 1985) between two tensors as vectors.

    It follows the arc between them, which preserves their length. Linear interpolation replaces it
    where the arc is not unique: the vectors are nearly parallel or opposite, or one is zero.
    """
    cosine = dot / (norms[0] * norms[1]) if all(norms) else 1.0
    if abs(cosine) > PARALLEL:
        return [1 - t, t]
    angle = math.acos(cosine)
    return [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)]
