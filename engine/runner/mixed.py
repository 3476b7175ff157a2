"""MixedGraphs: a step of decodes and chunks of prompts, recorded once per shape and replayed.

A shape has so many decodes, so many tokens of chunks, and places for CHUNKS sequences these belong
to. Decodes come first, filled up with the padding row, so they go to the decode kernel and chunks
to the extend kernel as in a step that is not recorded. Behind the chunks come empty sequences, and
tokens of the padding row that belong to none of them.

What the host knows of a step goes to the device in one copy. The recording ends with the logits, in
the buffer of DecodeGraphs; drawing from them is what follows a recorded decode, too. Shapes are
recorded while the engine is idle, the largest first; until then such a step runs kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.device.transfer import to_device
from engine.models.base import Model
from engine.runner.batch import StepInputs, count_decodes, input_columns, mixed_batch
from engine.runner.graphs import DecodeGraphs
from engine.runner.recorder import Recorder
from engine.runner.sequence_rows import SequenceRows
from engine.scheduling.step import ScheduledSlice

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
DECODES = (0, 8, 32, 64, 128, 256)
CHUNKS = 16  # sequences with chunks; their places are cheap, as empty ones end at once


class Shape(NamedTuple):
    """Of a recorded step: its decodes, and the tokens of its chunks."""

    decodes: int
    tokens: int


def mixed_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[Shape]:
    """Every shape that is recorded, the largest last."""
    decodes = _up_to(DECODES, max_num_seqs - 1)  # a chunk is another sequence's
    tokens = _up_to(TOKENS, max_num_batched_tokens)
    return [Shape(d, t) for t in tokens for d in decodes]


def _up_to(sizes: Sequence[int], limit: int) -> list[int]:
    most = min(limit, sizes[-1])
    return [size for size in sizes if size < most] + [most]


class MixedGraphs:
    """The recorded mixed steps of a decoder over given rows and KV cache, whose memory they use."""

    def __init__(
        self,
        model: Model,
        rows: SequenceRows,
        kv: KVCache,
        backend: AttentionBackend,
        recorder: Recorder,
        decode_graphs: DecodeGraphs,
        max_num_batched_tokens: int,
    ) -> None:
        self._model, self._rows, self._kv, self._backend = model, rows, kv, backend
        self._recorder, self._decode_graphs = recorder, decode_graphs
        self.shapes = mixed_shapes(rows.padding, max_num_batched_tokens)
        self._due = list(self.shapes)  # recorded from the end
        self._recorded: dict[Shape, Callable[[], None]] = {}
        most = sum(self._sizes(self.shapes[-1]))
        self.inputs = torch.zeros(most, dtype=torch.int64, device=rows.device)

    def shape_for(self, slices: Sequence[ScheduledSlice]) -> Shape | None:
        """The smallest shape that holds `slices`, recorded or not; None where there is no such."""
        decodes = count_decodes(slices)
        chunks = slices[decodes:]
        tokens = sum([s.count for s in chunks])
        if not 0 < len(chunks) <= CHUNKS or len(slices) > len(self._decode_graphs.logits):
            return None
        fitting = [s for s in self.shapes if s.decodes >= decodes and s.tokens >= tokens]
        return fitting[0] if fitting else None

    def has(self, shape: Shape) -> bool:
        return shape in self._recorded

    def capture_next(self) -> bool:
        """Record one more shape; False where all are recorded."""
        if not self._due:
            return False
        self.capture(self._due.pop())
        return True

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        # Recording computes: only padding rows, which leave nothing that is read.
        self._send(shape, [self._padding()])
        self._recorded[shape] = self._recorder.record(lambda: self._compute_logits(shape))

    def compute(self, shape: Shape, slices: Sequence[ScheduledSlice]) -> torch.Tensor:
        """Logits [R, V] of those of `slices` that sample, for DecodeGraphs to draw from; the next
        recorded step overwrites them."""
        self._send(shape, slices)
        self._recorded[shape]()
        return self._decode_graphs.logits[: len([1 for s in slices if s.samples])]

    def _padding(self) -> ScheduledSlice:
        row = self._rows.padding
        return ScheduledSlice(id=0, epoch=0, row=row, start=0, count=1, samples=False)

    def _sizes(self, shape: Shape) -> list[int]:
        """Of the fields of StepInputs, and of the rows that sample: as many as are ever drawn, so
        that none is left over from a step before."""
        sequences, tokens = shape.decodes + CHUNKS + 1, shape.decodes + shape.tokens
        most = len(self._decode_graphs.row_ids)
        logits = min(shape.decodes + CHUNKS, most)
        return [sequences, sequences, sequences + 1, tokens, tokens, logits, most]

    def _send(self, shape: Shape, slices: Sequence[ScheduledSlice]) -> None:
        """Fill the inputs: with `slices`, and to the shape's size with what is padding."""
        decodes, padding = count_decodes(slices), self._rows.padding
        missing = [self._padding()] * (shape.decodes - decodes)
        columns = input_columns([*slices[:decodes], *missing, *slices[decodes:]])
        columns.append(np.array([s.row for s in slices if s.samples], dtype=np.int64))
        fills = [padding, 1, columns[2][-1], 0, padding, 0, padding]
        packed = []
        for column, size, fill in zip(columns, self._sizes(shape), fills, strict=True):
            packed += [column, np.full(size - len(column), fill)]
        (sent,) = to_device([np.concatenate(packed)], self.inputs.device)
        self.inputs[: len(sent)].copy_(sent)

    def _compute_logits(self, shape: Shape) -> None:
        sizes = self._sizes(shape)
        *fields, sampling_rows = self.inputs[: sum(sizes)].split(sizes)
        inputs = StepInputs(*fields)
        self._decode_graphs.row_ids.copy_(sampling_rows)
        batch = mixed_batch(inputs, shape.decodes, self._rows, self._kv, self._backend)
        hidden = self._model.forward(batch).index_select(0, batch.logit_index)
        self._decode_graphs.logits[: len(hidden)].copy_(self._model.logits(hidden))
