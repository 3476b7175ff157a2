"""Buckets of distances between positions, for T5's relative bias (arXiv 1910.10683, 2.1)."""

from __future__ import annotations

import math

import torch


def relative_buckets(
    distance: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool
) -> torch.Tensor:
    """Bucket [...] int64 of each `distance` = key position - query position.

    Both directions share the buckets evenly; in one direction, keys ahead count as distance 0. The
    first half of a direction's buckets is exact, the rest logarithmic up to `max_distance`.
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
