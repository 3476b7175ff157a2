"""Build the ForwardBatch of a step: from its slices, or for decodes from the rows alone.

`compute` runs the model on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBackend, GroupLayout, StepLayout
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.device.transfer import to_device
from engine.models.adapters import ModelAdapters
from engine.models.base import Model
from engine.ops.lora import AdapterGroup, TokenAdapters
from engine.ops.seen_tokens import SeenTokens
from engine.ops.sequence_rows import gather_decode_inputs
from engine.ops.state_runs import StateRuns
from engine.runner.sequence_rows import SequenceRows
from engine.scheduling.step import ScheduledSlice, Step

GROUP_TOKENS_MULTIPLE = 8


class StepInputs(NamedTuple):
    """The rows and tokens of a step: T tokens of S sequences; L tokens need logits.

    All tensors are int64. Tokens after those of the last sequence are padding of a captured step.
    """

    rows: torch.Tensor  # [S]
    lengths: torch.Tensor  # [S] tokens, including those of this step
    query_starts: torch.Tensor  # [S + 1]
    positions: torch.Tensor  # [T]
    token_rows: torch.Tensor  # [T]
    logit_index: torch.Tensor  # [L] into the tokens
    runs: StateRuns | None = None  # None: no layer has a state

    @classmethod
    def of(cls, columns: Sequence[torch.Tensor]) -> StepInputs:
        """Return those of `input_columns`, with or without `state_columns` behind them."""
        rows, lengths, starts, positions, token_rows, index, *states = columns
        runs = StateRuns(*states) if states else None
        return cls(rows, lengths, starts, positions, token_rows, index, runs)


def input_columns(slices: Sequence[ScheduledSlice]) -> list[npt.NDArray[np.int64]]:
    """Return the fields of StepInputs, on the host."""
    starts = np.array([s.start for s in slices], dtype=np.int64)
    counts = np.array([s.count for s in slices], dtype=np.int64)
    slice_rows = np.array([s.row for s in slices], dtype=np.int64)
    ends = counts.cumsum()
    if len(slices) == ends[-1]:
        positions, token_rows = starts, slice_rows
    else:
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = np.repeat(starts, counts) + within
        token_rows = np.repeat(slice_rows, counts)
    samples = np.array([s.samples for s in slices])
    query_starts = np.concatenate([[0], ends])
    return [slice_rows, starts + counts, query_starts, positions, token_rows, ends[samples] - 1]


def state_columns(slices: Sequence[ScheduledSlice]) -> list[npt.NDArray[np.int64]]:
    """Return the fields of StateRuns, on the host, with as many runs as slices.

    Drafted tokens are behind the slice that they follow, and belong to its run.
    """
    starts: list[int] = []
    reads: list[int] = []
    writes = np.zeros(sum([s.count for s in slices]), dtype=np.int64)
    first = 0
    for s in slices:
        if s.draft < 0:
            starts.append(first)
            reads.append(s.states[0])
        for offset, slot in s.states[1]:
            writes[first + offset] = slot
        first += s.count
    missing = len(slices) - len(starts)
    starts += [first] * (missing + 1)
    reads += [0] * missing
    return [np.array(starts, dtype=np.int64), np.array(reads, dtype=np.int64), writes]


def rows_and_drafts(slices: Sequence[ScheduledSlice]) -> list[list[int]]:
    """Return the row of each slice, and how many drafted tokens of it the slice is ahead."""
    ahead: list[int] = []
    for s in slices:
        ahead.append(ahead[-1] + 1 if s.draft >= 0 else 0)
    return [[s.row for s in slices], ahead]


def count_decodes(slices: Sequence[ScheduledSlice]) -> int:
    """Return the number of leading slices with exactly one token."""
    return next((i for i, s in enumerate(slices) if s.count != 1), len(slices))


def has_adapters(slices: Sequence[ScheduledSlice]) -> bool:
    """Return whether a sequence of a step uses an adapter."""
    return any(s.adapter_slot for s in slices)


def adapter_groups(slices: Sequence[ScheduledSlice]) -> tuple[AdapterGroup, ...]:
    """Return the tokens of each adapter of a step, for a CPU.

    Their counts are rounded up, because oneDNN compiles a kernel for each number of rows.
    """
    counts = [s.count for s in slices]
    slots = np.repeat([s.adapter_slot for s in slices], counts)
    groups = []
    for slot in sorted(set(slots.tolist()) - {0}):
        tokens = np.flatnonzero(slots == slot)
        count = len(tokens)
        if count == len(slots):
            return (AdapterGroup(slot, count, None),)
        if count > GROUP_TOKENS_MULTIPLE:
            tokens = np.pad(tokens, (0, -count % GROUP_TOKENS_MULTIPLE), mode="edge")
        groups.append(AdapterGroup(slot, count, torch.from_numpy(tokens)))
    return tuple(groups)


def build_batch(
    step: Step,
    rows: SequenceRows,
    kv: KVCache,
    backend: AttentionBackend,
    adapters: ModelAdapters | None = None,
    seen: SeenTokens | None = None,
) -> ForwardBatch:
    """Gather the token ids, positions and KV slots of all tokens of `step`."""
    columns = input_columns(step.slices)
    if kv.states is not None:
        columns += state_columns(step.slices)
    inputs = StepInputs.of(to_device(columns, rows.device))
    last_keys = None if seen is None else seen.last_keys
    num_decodes = count_decodes(step.slices)
    batch = mixed_batch(inputs, num_decodes, rows, kv, backend, step.slices, last_keys)
    batch = replace(batch, seen=seen)
    positions = rows.positions_of(step.slices)
    if positions is not None:
        batch = replace(batch, positions=positions)
    if adapters is None or not has_adapters(step.slices):
        return batch
    groups = adapter_groups(step.slices) if adapters.takes_groups else ()
    return replace(batch, adapters=TokenAdapters(rows.adapters[inputs.token_rows], groups))


def mixed_batch(
    inputs: StepInputs,
    num_decodes: int,
    rows: SequenceRows,
    kv: KVCache,
    backend: AttentionBackend,
    slices: Sequence[ScheduledSlice] | None = None,
    last_keys: torch.Tensor | None = None,
) -> ForwardBatch:
    """Build the batch of `inputs`, with any mix of decodes and chunks.

    Without `slices` it uses only device tensors, so that the step can be captured. See StepLayout
    for `last_keys`.
    """
    positions, token_rows = inputs.positions, inputs.token_rows
    tables = rows.block_tables
    query_lens = seq_lens = encoder_lens = None
    has_drafts = False
    if slices is not None:
        query_lens = [s.count for s in slices]
        seq_lens = [s.start + s.count for s in slices]
        has_drafts = any(s.draft >= 0 for s in slices)
        encoder_lens = [rows.encoder_length[s.row] for s in slices]
        tables = tables[:, :, : -(-max(seq_lens + encoder_lens) // kv.block_size)]
    tables = tables.index_select(1, inputs.rows)
    token_blocks = rows.block_tables[:, token_rows, positions // kv.block_size]
    crosses = any(group.is_cross for group in kv.groups)
    encoder_lengths = rows.encoder_lengths.index_select(0, inputs.rows) if crosses else None
    layout = StepLayout(
        num_decodes=num_decodes,
        query_lens=query_lens,
        seq_lens=seq_lens,
        lengths=inputs.lengths.int(),
        query_starts=inputs.query_starts.int(),
        groups=[
            GroupLayout(
                tables[number],
                token_blocks[number],
                group.window,
                encoder_lens if group.is_cross else None,
                encoder_lengths if group.is_cross else None,
            )
            for number, group in enumerate(kv.groups)
        ],
        token_offsets=positions % kv.block_size,
        positions=positions,
        block_size=kv.block_size,
        has_drafts=has_drafts,
        last_keys=last_keys,
    )
    input_ids = rows.tokens[token_rows, positions].long()
    index, plan = inputs.logit_index, backend.plan(layout)
    count = len(positions)
    at = rows.positions(positions, token_rows)
    return ForwardBatch(input_ids, at, index, kv, plan, count, runs=inputs.runs)


def decode_batch(
    row_ids: torch.Tensor,
    ahead: torch.Tensor,
    rows: SequenceRows,
    kv: KVCache,
    backend: AttentionBackend,
    runs: StateRuns | None = None,
) -> ForwardBatch:
    """Build the batch of the last token of each of `row_ids` [R] int64, or of drafted ones `ahead`.

    The batch equals that of `build_batch` for the same decodes. It uses only device tensors, so
    that a step can be captured once and replayed with other rows.
    """
    inputs = gather_decode_inputs(
        row_ids,
        ahead,
        rows.tokens,
        rows.lengths,
        rows.block_tables,
        kv.block_size,
        kernels=rows.kernels,
    )
    count = len(row_ids)
    assert count < len(rows.numbers)
    crosses = any(group.is_cross for group in kv.groups)
    encoder_lengths = rows.encoder_lengths.index_select(0, row_ids) if crosses else None
    layout = StepLayout(
        num_decodes=count,
        query_lens=None,
        seq_lens=None,
        lengths=inputs.lengths,
        query_starts=rows.decode_starts[: count + 1],
        groups=[
            GroupLayout(
                inputs.block_tables[number],
                inputs.blocks[number],
                group.window,
                key_lengths=encoder_lengths if group.is_cross else None,
            )
            for number, group in enumerate(kv.groups)
        ],
        token_offsets=inputs.offsets,
        positions=inputs.positions,
        block_size=kv.block_size,
    )
    ids, plan = inputs.input_ids, backend.plan(layout)
    index = rows.numbers[:count]
    positions = rows.positions(inputs.positions, row_ids)
    return ForwardBatch(ids, positions, index, kv, plan, count, runs=runs)


def compute(model: Model, adapters: ModelAdapters | None, batch: ForwardBatch) -> torch.Tensor:
    """Return the hidden states [T, hidden] of a batch, with the adapters of its tokens."""
    if batch.adapters is None:
        return model.forward(batch)
    assert adapters is not None, "the scheduler gives slots only if there are some"
    with adapters.applied(batch.adapters):
        return model.forward(batch)
