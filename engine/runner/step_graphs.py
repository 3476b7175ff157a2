"""StepGraphs: whole steps captured as CUDA graphs, one per shape, and replayed in one call.

A step graph gathers its inputs from the SequenceRows, computes the model and leaves the logits in a
static buffer. A second graph per decode size draws the tokens from that buffer and appends them to
the rows: the host may adjust the logits between the two.

A decode step sends row ids alone and is filled up with the padding row. A step with prompt chunks
sends all its inputs in one copy. Its decodes come first, filled up with the padding row, then the
chunks in CHUNKS places; behind them come empty sequences, and tokens of the padding row that belong
to no sequence.

Common decode sizes are captured at start, the largest first. All other shapes are captured while
the engine is idle. Until then a decode step takes the next larger size, and a step with chunks runs
kernel by kernel.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.device.transfer import to_device
from engine.memory.graph_shapes import AT_START, GraphShape, decode_sizes, with_variants
from engine.models.adapters import ModelAdapters
from engine.models.base import Model
from engine.ops.lora import TokenAdapters
from engine.ops.state_runs import StateRuns
from engine.runner.batch import (
    StepInputs,
    compute,
    count_decodes,
    decode_batch,
    has_adapters,
    input_columns,
    mixed_batch,
    rows_and_drafts,
    state_columns,
)
from engine.runner.recorder import Recorder
from engine.runner.sequence_rows import SequenceRows
from engine.sampling.sampler import draw
from engine.scheduling.step import ScheduledSlice, Step

CHUNKS = 16  # sequences with prompt chunks in a captured step; empty places end at once
Replay = Callable[[], None]


class StepGraphs:
    """The captured steps of a model over given rows and a given KV cache, whose memory they use."""

    def __init__(
        self,
        model: Model,
        rows: SequenceRows,
        kv: KVCache,
        backend: AttentionBackend,
        recorder: Recorder,
        mixed: Sequence[GraphShape],
        adapters: ModelAdapters | None = None,
    ) -> None:
        """`mixed` are the shapes with chunks, the largest last."""
        self._model = model
        self._rows = rows
        self._kv = kv
        self._backend = backend
        self._recorder = recorder
        self._adapters = adapters
        sizes = decode_sizes(rows.padding)
        first = [size for size in sizes if size in AT_START or size == sizes[-1]]
        later = [size for size in sizes if size not in first]
        self.mixed = list(mixed)
        # Captured from the end.
        takes = adapters is not None
        self.waiting = with_variants([*mixed, *map(GraphShape, later)], has_adapters=takes)
        at_start = with_variants(map(GraphShape, first), has_adapters=takes)
        self.waiting += at_start
        self._num_at_start = len(at_start)
        self._steps: dict[GraphShape, Replay] = {}
        self._draws: dict[int, Replay] = {}
        self.sizes: list[int] = []  # captured decode sizes, ascending
        self._adapted_sizes: list[int] = []  # those of steps with adapters
        most = sizes[-1]
        device = rows.device
        self.row_ids = torch.full((most,), rows.padding, dtype=torch.int64, device=device)
        self.ahead = torch.zeros_like(self.row_ids)  # drafted tokens that an entry is ahead
        # Of a decode step's states: the fields of StateRuns, one after another.
        num_fields = 0 if kv.states is None else 3 * most + 1
        self.states = torch.zeros(num_fields, dtype=torch.int64, device=device)
        self.logits = torch.empty(most, model.config.vocab_size, dtype=torch.float32, device=device)
        self.tokens = torch.empty(most, dtype=torch.int64, device=device)
        num_inputs = 0
        if mixed:
            num_inputs = sum(self._input_sizes(mixed[-1]))
        self.inputs = torch.zeros(num_inputs, dtype=torch.int64, device=device)

    # ---- capture -----------------------------------------------------------------------------

    def capture_at_start(self) -> None:
        """Capture the decode sizes that the first requests need."""
        for _ in range(self._num_at_start):
            self.capture_next()

    def capture_next(self) -> bool:
        """Capture one more shape; returns False if all are captured."""
        if not self.waiting:
            return False
        self.capture(self.waiting.pop())
        return True

    @torch.inference_mode()
    def capture(self, shape: GraphShape) -> None:
        """Capture one shape. Capturing computes: it does so with padding rows alone."""
        if shape.chunk_tokens:
            self._send_inputs(shape, [self._padding_slice()])
            self._steps[shape] = self._recorder.record(lambda: self._compute_mixed(shape))
            return
        size = shape.decodes
        self.row_ids.fill_(self._rows.padding)
        self._steps[shape] = self._recorder.record(lambda: self._compute_decodes(shape))
        if shape.has_adapters:
            bisect.insort(self._adapted_sizes, size)
            return
        self._draws[size] = self._recorder.record(lambda: self._draw(size))
        bisect.insort(self.sizes, size)

    def is_captured(self, shape: GraphShape) -> bool:
        return shape in self._steps

    # ---- replay ------------------------------------------------------------------------------

    def size_for(self, count: int, *, has_adapters: bool = False) -> int | None:
        """Return the smallest captured decode size that holds `count` rows, or None."""
        sizes = self._adapted_sizes if has_adapters else self.sizes
        index = bisect.bisect_left(sizes, count)
        return sizes[index] if index < len(sizes) else None

    def shape_for(self, step: Step) -> GraphShape | None:
        """Return the shape that `step` takes, or None if it fits none.

        Decodes take the smallest captured size. A step with chunks takes the smallest shape, which
        may not be captured yet: a larger one would compute too many tokens.
        """
        adapted = self._adapters is not None and has_adapters(step.slices)
        if step.is_decode:
            size = self.size_for(len(step.slices), has_adapters=adapted)
            return None if size is None else GraphShape(size, has_adapters=adapted)
        decodes = count_decodes(step.slices)
        chunks = step.slices[decodes:]
        if not 0 < len(chunks) <= CHUNKS or len(step.slices) > len(self.logits):
            return None
        tokens = sum([s.count for s in chunks])
        for shape in self.mixed:
            if shape.decodes >= decodes and shape.chunk_tokens >= tokens:
                return shape._replace(has_adapters=adapted)
        return None

    def replay(self, step: Step) -> torch.Tensor | None:
        """Replay a step whose shape is captured. Return what `compute` does, or None."""
        shape = self.shape_for(step)
        if shape is None or not self.is_captured(shape):
            return None
        return self.compute(shape, step.slices)

    def compute(self, shape: GraphShape, slices: Sequence[ScheduledSlice]) -> torch.Tensor:
        """Replay a step: logits [R, V] of the slices that sample. The next call overwrites them."""
        if shape.chunk_tokens:
            self._send_inputs(shape, slices)
            num_sampling = len([1 for s in slices if s.samples])
        else:
            self._send_rows(shape, slices)
            num_sampling = len(slices)
        self._steps[shape]()
        return self.logits[:num_sampling]

    def draw(self, count: int) -> torch.Tensor:
        """Draw tokens [count] from the logits that `compute` left, and append them to their rows.

        The next call overwrites them.
        """
        size = self.size_for(count)
        assert size is not None, "a step that was replayed fits its draw"
        self._draws[size]()
        return self.tokens[:count]

    # ---- inputs ------------------------------------------------------------------------------

    def _send_rows(self, shape: GraphShape, slices: Sequence[ScheduledSlice]) -> None:
        size = shape.decodes
        row_ids, ahead = rows_and_drafts(slices)
        missing = size - len(slices)
        row_ids += [self._rows.padding] * missing
        ahead += [0] * missing
        columns: list[Any] = [row_ids, ahead]
        if self._kv.states is not None:
            padded = [*slices, *[self._padding_slice()] * missing]
            columns += state_columns(padded)
        sent_ids, sent_ahead, *states = to_device(columns, self.row_ids.device)
        self.row_ids[:size].copy_(sent_ids)
        self.ahead[:size].copy_(sent_ahead)
        if states:
            self.states[: 3 * size + 1].copy_(torch.cat(states))

    def _padding_slice(self) -> ScheduledSlice:
        row = self._rows.padding
        return ScheduledSlice(id=0, epoch=0, row=row, start=0, count=1, samples=False)

    def _input_sizes(self, shape: GraphShape) -> list[int]:
        """Return the lengths of StepInputs' fields, and of the row ids and drafts that sample.

        These fill their whole buffers, so that none remains from the step before.
        """
        most_sampling = len(self.row_ids)
        sequences = shape.decodes + CHUNKS + 1
        tokens = shape.decodes + shape.chunk_tokens
        logits = min(shape.decodes + CHUNKS, most_sampling)
        sampling = [most_sampling, most_sampling]
        states = [sequences + 1, sequences, tokens] if self._kv.states is not None else []
        return [sequences, sequences, sequences + 1, tokens, tokens, logits, *states, *sampling]

    def _send_inputs(self, shape: GraphShape, slices: Sequence[ScheduledSlice]) -> None:
        """Fill the inputs with `slices`, and up to the shape's size with padding."""
        padding = self._rows.padding
        decodes = count_decodes(slices)
        missing = [self._padding_slice()] * (shape.decodes - decodes)
        padded = [*slices[:decodes], *missing, *slices[decodes:]]
        columns = input_columns(padded)
        num_tokens = columns[2][-1]
        state_fills: list[int] = []
        if self._kv.states is not None:
            columns += state_columns(padded)
            state_fills = [num_tokens, 0, 0]
        sampling = rows_and_drafts([s for s in slices if s.samples])
        columns += [np.array(column, dtype=np.int64) for column in sampling]
        fills = [padding, 1, num_tokens, 0, padding, 0, *state_fills, padding, 0]
        packed = []
        for column, size, fill in zip(columns, self._input_sizes(shape), fills, strict=True):
            packed += [column, np.full(size - len(column), fill)]
        (sent,) = to_device([np.concatenate(packed)], self.inputs.device)
        self.inputs[: len(sent)].copy_(sent)

    # ---- captured functions ------------------------------------------------------------------

    def _compute_decodes(self, shape: GraphShape) -> None:
        row_ids, ahead = self.row_ids[: shape.decodes], self.ahead[: shape.decodes]
        runs: StateRuns | None = None
        if self._kv.states is not None:
            count = shape.decodes
            runs = StateRuns(*self.states[: 3 * count + 1].split([count + 1, count, count]))
        batch = decode_batch(row_ids, ahead, self._rows, self._kv, self._backend, runs)
        self._leave_logits(self._hidden(shape, batch, row_ids))

    def _compute_mixed(self, shape: GraphShape) -> None:
        sizes = self._input_sizes(shape)
        *fields, sampling_rows, ahead = self.inputs[: sum(sizes)].split(sizes)
        self.row_ids.copy_(sampling_rows)
        self.ahead.copy_(ahead)
        inputs = StepInputs.of(fields)
        batch = mixed_batch(inputs, shape.decodes, self._rows, self._kv, self._backend)
        hidden = self._hidden(shape, batch, inputs.token_rows)
        self._leave_logits(hidden.index_select(0, batch.logit_index))

    def _hidden(
        self, shape: GraphShape, batch: ForwardBatch, token_rows: torch.Tensor
    ) -> torch.Tensor:
        if shape.has_adapters:
            slots = self._rows.adapters.index_select(0, token_rows)
            batch = replace(batch, adapters=TokenAdapters(slots))
        return compute(self._model, self._adapters, batch)

    def _leave_logits(self, hidden: torch.Tensor) -> None:
        self.logits[: len(hidden)].copy_(self._model.logits(hidden))

    def _draw(self, size: int) -> None:
        row_ids, ahead = self.row_ids[:size], self.ahead[:size]
        params = self._rows.draw_params(row_ids, ahead)
        tokens = draw(self.logits[:size], params, self._rows.kernels, static=True)
        self._rows.append(row_ids, params, ahead, tokens)
        self.tokens[:size].copy_(tokens)
