"""Buckets of position distances for T5's relative bias (arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

import math

import torch


def relative_buckets(
    distance: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool
) -> torch.Tensor:
    """Return the bucket [...] int64 of each `distance` = key position - query position.

    If `bidirectional`, each direction has half of the buckets. Otherwise, keys after the query
    count as distance 0. The first half of a direction's buckets hold one distance each. The others
    grow logarithmically up to `max_distance`.
    """
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        offset = torch.zeros_like(distance)
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    growth = (distance.float().clamp(min=1) / exact).log() / math.log(max_distance / exact)
    growing = exact + (growth * (num_buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, growing.clamp(max=num_buckets - 1))
