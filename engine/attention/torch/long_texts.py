"""Attention of a long text without a KV cache: a part of its queries at a time.

The scores of all queries would take gigabytes. A part is prepared for each layer again, because the
masks of all parts together would take as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import FUSED_SPLIT, MAX_SCORES, SPLIT, QueryGroup
from engine.attention.torch.fused import FusedAttention
from engine.attention.torch.matmul import MatmulAttention
from engine.attention.torch.query_rows import QueryRows


class LongTextAttention:
    """Attention of a group that is one text, in all layers with the same spec."""

    def __init__(
        self,
        group: QueryGroup,
        spec: AttentionSpec,
        prepare: Callable[[QueryGroup], FusedAttention | MatmulAttention],
    ) -> None:
        """`prepare` returns the attention of a part of the queries."""
        self.rows = QueryRows(group, spec)
        self._group, self._window, self._prepare = group, spec.window, prepare

    def __call__(
        self, kv: LayerKV, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs [count, H, D] for the queries [T, H, D] of the step."""
        parts = query_parts(self._group, self._window)
        return torch.cat([self._prepare(part)(kv, query, sinks) for part in parts])


def is_long_text(group: QueryGroup) -> bool:
    """Return whether the queries of a group, with blocks of one token, are computed in parts.

    Such a group is always one text, so a text is divided in the same way in every step.
    """
    return group.sequences == 1 and group.count * group.tables.shape[1] > MAX_SCORES


def query_parts(group: QueryGroup, window: int | None) -> Iterator[QueryGroup]:
    """Yield the parts of a text's queries, with the keys that they see."""
    keys = group.tables.shape[1]
    padded = -(-keys // SPLIT) * SPLIT
    size = max(1, MAX_SCORES // padded)
    for start in range(0, group.count, size):
        end = min(start + size, group.count)
        first, past = 0, keys
        if window is not None:
            first = max(0, start - window + 1) // FUSED_SPLIT * FUSED_SPLIT
            past = min(end + window - 1, keys)
        yield replace(
            group,
            first=group.first + start,
            count=end - start,
            positions=group.positions[:, start:end],
            tables=group.tables[:, first:past],
            first_keys=group.last_keys.new_tensor([first]) if first else None,
        )
