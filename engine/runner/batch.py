"""Building the ForwardBatch of a step from its slices and the rows."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, GroupLayout, StepLayout
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.runner.rows import SequenceRows
from engine.scheduling.step import Step


def build_batch(
    step: Step, rows: SequenceRows, kv: KVCache, backend: AttentionBackend
) -> ForwardBatch:
    """Gather inputs, positions and KV slots of all tokens of `step`."""
    device = rows.tokens.device
    starts = np.array([s.start for s in step.slices], dtype=np.int64)
    counts = np.array([s.count for s in step.slices], dtype=np.int64)
    slice_rows = np.array([s.row for s in step.slices], dtype=np.int64)
    ends = counts.cumsum()
    if len(step.slices) == ends[-1]:
        positions_host, token_rows_host = starts, slice_rows
    else:
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions_host = np.repeat(starts, counts) + within
        token_rows_host = np.repeat(slice_rows, counts)
    samples = np.array([s.samples for s in step.slices])
    logit_index = torch.from_numpy(ends[samples] - 1).to(device)
    positions = torch.from_numpy(positions_host).to(device)
    token_rows = torch.from_numpy(token_rows_host).to(device)

    seq_lens = (starts + counts).tolist()
    longest = max(seq_lens + [rows.source_length[s.row] for s in step.slices])
    tables = rows.block_tables[:, :, : -(-longest // kv.block_size)]
    tables = tables.index_select(1, torch.from_numpy(slice_rows).to(device))
    token_blocks = rows.block_tables[:, token_rows, positions // kv.block_size]
    layout = StepLayout(
        query_lens=counts.tolist(),
        seq_lens=seq_lens,
        groups=[
            GroupLayout(
                tables[number],
                token_blocks[number],
                group.window,
                [rows.source_length[s.row] for s in step.slices] if group.cross else None,
            )
            for number, group in enumerate(kv.groups)
        ],
        token_offsets=positions % kv.block_size,
        positions=positions,
        block_size=kv.block_size,
    )
    input_ids = rows.tokens[token_rows, positions].long()
    prev_ids = rows.tokens[token_rows, (positions - 1).clamp_(min=0)].long()
    return ForwardBatch(input_ids, prev_ids, positions, logit_index, kv, backend.plan(layout))
