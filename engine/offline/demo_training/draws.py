"""The seeded random generator of the training texts."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TypeVar

T = TypeVar("T")
SEED = 20260  # of the training


class Draws(Random):
    """A seeded random generator."""

    def chance(self, share: float) -> bool:
        """Return True in this share of all draws."""
        return self.random() < share

    def weighted(self, weights: Mapping[T, float]) -> T:
        """Return one of the keys, in proportion to their weights."""
        keys = list(weights)
        shares = list(weights.values())
        return self.choices(keys, shares)[0]
