"""Building the ForwardBatch of a step: from its slices, or for decodes from the rows alone."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, GroupLayout, StepLayout
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.ops.rows import gather_decode_inputs
from engine.platform import to_device
from engine.runner.rows import SequenceRows
from engine.scheduling.step import Step


def build_batch(
    step: Step, rows: SequenceRows, kv: KVCache, backend: AttentionBackend
) -> ForwardBatch:
    """Gather inputs, positions and KV slots of all tokens of `step`."""
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
    row_index, lengths, query_starts, positions, token_rows, logit_index = to_device(
        [
            slice_rows,
            starts + counts,
            np.concatenate([[0], ends]),
            positions_host,
            token_rows_host,
            ends[samples] - 1,
        ],
        rows.device,
    )

    seq_lens = (starts + counts).tolist()
    source_lens = [rows.source_length[s.row] for s in step.slices]
    tables = rows.block_tables[:, :, : -(-max(seq_lens + source_lens) // kv.block_size)]
    tables = tables.index_select(1, row_index)
    token_blocks = rows.block_tables[:, token_rows, positions // kv.block_size]
    crosses = any(group.cross for group in kv.groups)
    source_lengths = rows.source_lengths.index_select(0, row_index) if crosses else None
    layout = StepLayout(
        query_lens=counts.tolist(),
        seq_lens=seq_lens,
        lengths=lengths.int(),
        query_starts=query_starts.int(),
        groups=[
            GroupLayout(
                tables[number],
                token_blocks[number],
                group.window,
                source_lens if group.cross else None,
                source_lengths if group.cross else None,
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


def decode_batch(
    row_ids: torch.Tensor, rows: SequenceRows, kv: KVCache, backend: AttentionBackend
) -> ForwardBatch:
    """The last token of each of `row_ids` [R] int64, from device tensors alone.

    What `build_batch` makes of the same decodes; here nothing depends on the host, so that it can
    be captured once and replayed with other rows.
    """
    inputs = gather_decode_inputs(
        row_ids, rows.tokens, rows.lengths, rows.block_tables, kv.block_size
    )
    source_lengths = rows.source_lengths.index_select(0, row_ids)
    numbers = torch.arange(len(row_ids) + 1, device=rows.device)
    layout = StepLayout(
        query_lens=[1] * len(row_ids),
        seq_lens=None,
        lengths=inputs.lengths,
        query_starts=numbers.int(),
        groups=[
            GroupLayout(
                inputs.block_tables[number],
                inputs.blocks[number],
                group.window,
                key_lengths=source_lengths if group.cross else None,
            )
            for number, group in enumerate(kv.groups)
        ],
        token_offsets=inputs.offsets,
        positions=inputs.positions,
        block_size=kv.block_size,
    )
    ids = inputs.input_ids, inputs.prev_ids
    return ForwardBatch(*ids, inputs.positions, numbers[:-1], kv, backend.plan(layout))
