"""StepGraphs: whole steps captured as CUDA graphs, one per shape, and replayed in one call.

A step graph reads its inputs (GraphInputs) and the SequenceRows, computes the model, leaves the
logits in a static buffer, draws the tokens and appends them to the rows.

If the host changes the logits before the draw, the step draws for no row. A second graph, one per
decode size, then draws from the buffer what the host has left there.

A decode step is filled up with the padding row. In a step with prompt chunks the decodes come
first, filled up with the padding row, then the chunks in CHUNKS places; behind them come empty
sequences, and tokens of the padding row that belong to no sequence.

Common decode sizes are captured at start, the largest first. All other shapes are captured while
the engine is idle. Until then a decode step takes the next larger size, and a step with chunks runs
kernel by kernel.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.memory.graph_shapes import AT_START, GraphShape, decode_sizes, with_variants
from engine.models.adapters import ModelAdapters
from engine.models.base import Model
from engine.ops.lora import TokenAdapters
from engine.runner.batch import compute, count_decodes, decode_batch, has_adapters, mixed_batch
from engine.runner.graph_inputs import CHUNKS, GraphInputs
from engine.runner.recorder import Recorder
from engine.runner.sequence_rows import SequenceRows
from engine.scheduling.step import ScheduledSlice, Step

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
        most, device = sizes[-1], rows.device
        largest = [GraphShape(most), *mixed[-1:]]
        has_states = kv.states is not None
        self.inputs = GraphInputs(rows.padding, most, largest, device, has_states=has_states)
        self.logits = torch.empty(most, model.config.vocab_size, dtype=torch.float32, device=device)
        self.tokens = torch.empty(most, dtype=torch.int64, device=device)
        self._has_drawn = False  # whether the last step has drawn its tokens

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
        self.inputs.send_padding(shape)
        self._steps[shape] = self._recorder.record(lambda: self._compute(shape))
        if shape.chunk_tokens:
            return
        size = shape.decodes
        if shape.has_adapters:
            bisect.insort(self._adapted_sizes, size)
            return
        self._draws[size] = self._recorder.record(lambda: self._draw(self.inputs.row_ids, size))
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

    def replay(self, step: Step, *, draws: bool) -> torch.Tensor | None:
        """Replay a step whose shape is captured. Return what `compute` does, or None."""
        shape = self.shape_for(step)
        if shape is None or not self.is_captured(shape):
            return None
        return self.compute(shape, step.slices, draws=draws)

    def compute(
        self, shape: GraphShape, slices: Sequence[ScheduledSlice], *, draws: bool
    ) -> torch.Tensor:
        """Replay a step: logits [R, V] of the slices that sample. The next call overwrites them.

        Without `draws` the host may change them before it calls `draw`.
        """
        self.inputs.send(shape, slices, draws=draws)
        self._steps[shape]()
        self._has_drawn = draws
        return self.logits[: len([s for s in slices if s.samples])]

    def draw(self, count: int) -> torch.Tensor:
        """Return the tokens [count] of the logits that `compute` left; their rows have them.

        The next step overwrites them.
        """
        if not self._has_drawn:
            size = self.size_for(count)
            assert size is not None, "a step that was replayed fits its draw"
            self._draws[size]()
        return self.tokens[:count]

    # ---- captured functions ------------------------------------------------------------------

    def _compute(self, shape: GraphShape) -> None:
        batch, token_rows = self._batch(shape)
        if shape.has_adapters:
            slots = self._rows.adapters.index_select(0, token_rows)
            batch = replace(batch, adapters=TokenAdapters(slots))
        hidden = compute(self._model, self._adapters, batch)
        if shape.chunk_tokens:
            hidden = hidden.index_select(0, batch.logit_index)
        buffer = self.logits[: len(hidden)]
        logits = self._model.logits(hidden, buffer)
        if logits is not buffer:
            buffer.copy_(logits)
        self._draw(self.inputs.drawn_rows, len(hidden))

    def _batch(self, shape: GraphShape) -> tuple[ForwardBatch, torch.Tensor]:
        """Return the batch of a shape, and the row of each of its tokens."""
        inputs, runs = self.inputs.fields(shape)
        rows, kv, backend = self._rows, self._kv, self._backend
        if inputs is None:
            row_ids, ahead = (
                self.inputs.row_ids[: shape.decodes],
                self.inputs.ahead[: shape.decodes],
            )
            return decode_batch(row_ids, ahead, rows, kv, backend, runs), row_ids
        return mixed_batch(inputs, shape.decodes, rows, kv, backend), inputs.token_rows

    def _draw(self, row_ids: torch.Tensor, count: int) -> None:
        logits, out = self.logits[:count], self.tokens[:count]
        self._rows.draw_next(
            logits, row_ids[:count], self.inputs.ahead[:count], static=True, out=out
        )
