"""DecodeGraphs: a whole decode step recorded once per batch size and replayed in one call.

A recorded step gathers its inputs from the SequenceRows by row id, computes the model, and leaves
the logits in a static buffer; a second recording draws the tokens, appends them to the rows and
leaves them in another. The host sends row ids and nothing else. They are two so that a batch of
which a row wants more than `draw` knows replays the first and samples by itself.

A batch is filled up to the next recorded size with the padding row. A few sizes are recorded at
start, largest first, the others while the engine is idle; until then a batch takes the next larger.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.device.transfer import to_device
from engine.models.base import Model
from engine.runner.batch import decode_batch
from engine.runner.recorder import Recorder
from engine.runner.sequence_rows import SequenceRows
from engine.sampling.draw import draw

SIZES = (*range(1, 9), *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
AT_START = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The sizes that are recorded, up to `max_num_seqs`; a batch larger than all runs eagerly."""
    most = min(max_num_seqs, SIZES[-1])
    return [size for size in SIZES if size < most] + [most]


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The two recordings of a batch size."""

    logits: Callable[[], None]
    tokens: Callable[[], None]


class DecodeGraphs:
    """The recorded decode steps of a model over given rows and KV cache, whose memory they use."""

    def __init__(
        self,
        model: Model,
        rows: SequenceRows,
        kv: KVCache,
        backend: AttentionBackend,
        recorder: Recorder,
    ) -> None:
        self._model, self._rows, self._kv, self._backend = model, rows, kv, backend
        self._recorder = recorder
        sizes = batch_sizes(rows.padding)
        first = [size for size in sizes if size in AT_START or size == sizes[-1]]
        later = [size for size in sizes if size not in first]
        # Recorded from the end: the largest first, then those that are due at start.
        self._due = [*later, *first]
        self._at_start = len(first)
        self._recorded: dict[int, DecodeGraph] = {}
        self.sizes: list[int] = []  # recorded so far, ascending
        most, device = sizes[-1], rows.device
        self.row_ids = torch.full((most,), rows.padding, dtype=torch.int64, device=device)
        self.logits = torch.empty(most, model.config.vocab_size, dtype=torch.float32, device=device)
        self.tokens = torch.empty(most, dtype=torch.int64, device=device)

    def capture_first(self) -> None:
        """The sizes that the first requests need."""
        for _ in range(self._at_start):
            self.capture_next()

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Record one more size; False where all are recorded."""
        if not self._due:
            return False
        size = self._due.pop()
        # Recording computes: only padding rows, which leave nothing that is read.
        self.row_ids.fill_(self._rows.padding)
        logits = self._recorder.record(lambda: self._compute_logits(size))
        tokens = self._recorder.record(lambda: self._draw_tokens(size))
        self._recorded[size] = DecodeGraph(logits, tokens)
        bisect.insort(self.sizes, size)
        return True

    def size_for(self, count: int) -> int | None:
        """The smallest recorded size that holds `count` rows, if any does."""
        index = bisect.bisect_left(self.sizes, count)
        return self.sizes[index] if index < len(self.sizes) else None

    def compute(self, row_ids: Sequence[int]) -> torch.Tensor:
        """Logits [R, V] of the last tokens of `row_ids`; the next call overwrites them."""
        size = self._size(len(row_ids))
        padded = [*row_ids, *[self._rows.padding] * (size - len(row_ids))]
        (sent,) = to_device([padded], self.row_ids.device)
        self.row_ids[:size].copy_(sent)
        self._recorded[size].logits()
        return self.logits[: len(row_ids)]

    def draw(self, count: int) -> torch.Tensor:
        """Tokens [R] drawn from what `compute` has left and appended to its `count` rows; the next
        call overwrites them."""
        self._recorded[self._size(count)].tokens()
        return self.tokens[:count]

    def _size(self, count: int) -> int:
        size = self.size_for(count)
        assert size is not None, "the caller asks size_for first"
        return size

    def _compute_logits(self, size: int) -> None:
        batch = decode_batch(self.row_ids[:size], self._rows, self._kv, self._backend)
        self.logits[:size].copy_(self._model.logits(self._model.forward(batch)))

    def _draw_tokens(self, size: int) -> None:
        row_ids = self.row_ids[:size]
        params = self._rows.draw_params(row_ids)
        tokens = draw(self.logits[:size], params, self._rows.kernels)
        self._rows.append(row_ids, tokens)
        self.tokens[:size].copy_(tokens)
