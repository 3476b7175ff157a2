"""GraphInputs: what captured steps read, in one buffer that is uploaded only when it changes.

The buffer begins with the entries that sample: their rows, the drafted tokens that they are ahead,
and the rows that the step itself draws for. These are the same rows, or the padding row if the host
changes the logits before the draw. Behind them are the fields of StepInputs, in a step with prompt
chunks, and of StateRuns, if layers keep states.

All fields are filled up with padding, so that none remains from the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfer import upload
from engine.memory.graph_shapes import GraphShape
from engine.ops.state_runs import StateRuns
from engine.runner.batch import (
    StepInputs,
    count_decodes,
    input_columns,
    rows_and_drafts,
    state_columns,
)
from engine.scheduling.step import ScheduledSlice

CHUNKS = 16  # sequences with prompt chunks in a captured step; empty places end at once
Columns = list[npt.NDArray[np.int64]]


class GraphInputs:
    """The inputs of captured steps, with up to `most` entries that sample."""

    def __init__(
        self,
        padding: int,
        most: int,
        shapes: Sequence[GraphShape],
        device: torch.device,
        *,
        has_states: bool,
    ) -> None:
        """`padding` is the padding row; `shapes` are the largest ones."""
        self._most = most
        self._has_states = has_states
        row = ScheduledSlice(id=0, epoch=0, row=padding, start=0, count=1, samples=False)
        self._padding = row
        size = max(sum(self._sizes(shape)) for shape in shapes)
        self._buffer = torch.zeros(size, dtype=torch.int64, device=device)
        self._sent = np.zeros(size, dtype=np.int64)  # what the buffer holds
        self._sampling: tuple[bool, list[int], list[int]] | None = None  # what it begins with
        self.row_ids, self.ahead, self.drawn_rows = self._buffer[: 3 * most].split(most)

    # ---- on the device -----------------------------------------------------------------------

    def fields(self, shape: GraphShape) -> tuple[StepInputs | None, StateRuns | None]:
        """Return the StepInputs of a shape with chunks, and the StateRuns of any shape.

        Each is None if there are none.
        """
        sizes = self._sizes(shape)
        fields = self._buffer[: sum(sizes)].split(sizes)[3:]
        if shape.chunk_tokens:
            inputs = StepInputs.of(fields)
            return inputs, inputs.runs
        return None, StateRuns(*fields) if fields else None

    # ---- from the host -----------------------------------------------------------------------

    def send_padding(self, shape: GraphShape) -> None:
        """Fill the inputs of a shape with padding rows alone."""
        self.send(shape, [self._padding] if shape.chunk_tokens else [])

    def send(
        self, shape: GraphShape, slices: Sequence[ScheduledSlice], *, draws: bool = True
    ) -> None:
        """Fill the inputs of a shape with `slices`, and copy them if the buffer holds others."""
        fill = self._mixed_fields if shape.chunk_tokens else self._decode_fields
        rows, ahead = rows_and_drafts([s for s in slices if s.samples])
        fields = fill(shape, slices)
        sampling = draws, rows, ahead
        if sampling == self._sampling and not fields:
            return
        entries = np.full((3, self._most), self._padding.row, dtype=np.int64)
        entries[0, : len(rows)] = rows
        entries[1] = 0
        entries[1, : len(rows)] = ahead
        if draws:
            entries[2] = entries[0]
        packed = np.concatenate([entries.ravel(), *fields])
        sent = self._sent[: len(packed)]
        if not np.array_equal(packed, sent):
            upload(packed, self._buffer[: len(packed)])
            sent[:] = packed
        self._sampling = sampling

    def _decode_fields(self, shape: GraphShape, slices: Sequence[ScheduledSlice]) -> Columns:
        if not self._has_states:
            return []
        return state_columns([*slices, *[self._padding] * (shape.decodes - len(slices))])

    def _mixed_fields(self, shape: GraphShape, slices: Sequence[ScheduledSlice]) -> Columns:
        decodes = count_decodes(slices)
        missing = [self._padding] * (shape.decodes - decodes)
        padded = [*slices[:decodes], *missing, *slices[decodes:]]
        columns = input_columns(padded)
        num_tokens = columns[2][-1]
        fills = [self._padding.row, 1, num_tokens, 0, self._padding.row, 0]
        if self._has_states:
            columns += state_columns(padded)
            fills += [num_tokens, 0, 0]
        packed = []
        for column, size, fill in zip(columns, self._sizes(shape)[3:], fills, strict=True):
            packed += [column, np.full(size - len(column), fill)]
        return packed

    def _sizes(self, shape: GraphShape) -> list[int]:
        """Return the lengths of all fields: of the entries that sample, then of the others."""
        entries = [self._most] * 3
        decodes = shape.decodes
        if not shape.chunk_tokens:
            return [*entries, decodes + 1, decodes, decodes] if self._has_states else entries
        sequences = decodes + CHUNKS + 1
        tokens = decodes + shape.chunk_tokens
        logits = min(decodes + CHUNKS, self._most)
        states = [sequences + 1, sequences, tokens] if self._has_states else []
        return [*entries, sequences, sequences, sequences + 1, tokens, tokens, logits, *states]
