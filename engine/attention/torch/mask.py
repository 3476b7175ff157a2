"""The additive mask of a query group: hidden keys, and T5's relative bias."""

from __future__ import annotations

import torch

from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import QueryGroup
from engine.ops.relative_bias import relative_buckets

HIDDEN = float("-inf")


def attention_mask(
    group: QueryGroup,
    spec: AttentionSpec,
    num_keys: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the additive mask [S, H or 1, count, keys].

    It is minus infinity where a query must not see a key, and the relative bias or 0 elsewhere.
    """
    queries = group.positions[:, :, None]  # [S, count, 1]
    keys = torch.arange(num_keys, device=queries.device)  # [keys], or [S, 1, keys]
    if group.first_keys is not None:
        keys = keys + group.first_keys[:, None, None]
    if spec.kind == "causal":
        last_keys = queries
        if spec.sees_whole_images and group.seen_keys is not None:
            last_keys = group.seen_keys[:, :, None]
    else:
        last_keys = group.last_keys[:, None, None].expand_as(queries)
    is_hidden = keys > last_keys  # [S, count, keys]
    if spec.window is not None:
        is_hidden = is_hidden | (keys <= queries - spec.window)
        if spec.kind == "full":
            is_hidden = is_hidden | (keys >= queries + spec.window)
    relative = spec.relative
    if relative is None:
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
        return mask.masked_fill_(is_hidden, HIDDEN)[:, None]
    assert bias is not None
    buckets = relative_buckets(
        keys - queries, relative.num_buckets, relative.max_distance, relative.bidirectional
    )
    by_head = bias[buckets].permute(0, 3, 1, 2)  # [S, H, count, keys]
    return by_head.masked_fill(is_hidden[:, None], HIDDEN)
