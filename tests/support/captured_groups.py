"""Query groups for a captured step, so that a tape can capture the torch backend on a CPU.

The engine captures no step with this backend: it would gather every sequence's whole block table.
"""

from __future__ import annotations

import torch

from engine.attention.backend import GroupLayout, StepLayout
from engine.attention.torch.batching import QueryGroup


def captured_groups(layout: StepLayout, kv: GroupLayout) -> list[QueryGroup]:
    """Return one group in which each token has its sequence's whole block table.

    The shapes and values depend on no data of the host. This replaces `query_groups`.
    """
    positions = layout.positions[:, None]
    tables = kv.block_tables
    lengths = layout.lengths if kv.key_lengths is None else kv.key_lengths
    last_keys = lengths - 1
    if layout.num_decodes < len(tables):
        tokens = torch.arange(len(positions), dtype=torch.int32, device=tables.device)
        owners = torch.searchsorted(layout.query_starts[1:], tokens, right=True)
        owners.clamp_(max=len(tables) - 1)
        tables = tables.index_select(0, owners)
        last_keys = last_keys.index_select(0, owners)
    first_keys = None
    if kv.window is not None:
        # Blocks before the window may belong to another sequence by now. A NaN in them would pass
        # the mask, so read the null block instead.
        seen = (positions - kv.window + 1).clamp(min=0) // layout.block_size
        entries = torch.arange(tables.shape[1], device=tables.device)
        tables = tables.where(entries >= seen, 0)
        first_keys = torch.zeros_like(last_keys)
    return [QueryGroup(0, len(tables), 1, positions, tables, first_keys, last_keys)]
