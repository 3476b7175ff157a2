"""Merged weights as sums: how much of each model a merged tensor holds.

Every method adds the models' tensors up, each times its share; only the shares differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PARALLEL = 0.9995  # mergekit's bound: beyond it the arc and its chord agree to one part in 10^4


def linear(weights: Sequence[float], *, normalize: bool) -> list[float]:
    """The weighted mean ("model soups", arXiv 2203.05482); the weighted sum without `normalize`."""
    total = sum(weights) if normalize else 1.0
    return [weight / total for weight in weights]


def ema(count: int, decay: float) -> list[float]:
    """Exponential moving average over checkpoints in the order of training: beginning with the
    first, each next one c makes it decay · average + (1 - decay) · c."""
    later = [(1 - decay) * decay**age for age in reversed(range(count - 1))]
    return [decay ** (count - 1), *later]


def liti(t: float) -> list[float]:
    """From the initial model (t = 0) towards the tuned one (t = 1): arXiv 2406.16768, section 3."""
    return [1 - t, t]


def slerp(t: float, dot: float, norms: tuple[float, float]) -> list[float]:
    """Along the arc between two tensors seen as vectors (Shoemake 1985), which keeps their length.

    The chord instead where there is no one arc: where they are nearly parallel or opposite, or
    where one of them is zero.
    """
    cosine = dot / (norms[0] * norms[1]) if all(norms) else 1.0
    if abs(cosine) > PARALLEL:
        return [1 - t, t]
    angle = math.acos(cosine)
    return [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)]
