"""Explanations: how the tokens of past answers were drawn. Steps of their prompts compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.runner.pending_step import ReadExplained
from engine.runner.sequence_rows import SequenceRows
from engine.sampling.explain import PendingExplanation
from engine.sampling.masks import SequenceGrammars
from engine.sampling.sampler import Draw
from engine.scheduling.step import ScheduledSlice

Logits = Callable[[torch.Tensor], torch.Tensor]


class Explanations:
    """Explains the known tokens of rows that want it. `draw` is the sampler's function."""

    def __init__(self, rows: SequenceRows, draw: Draw) -> None:
        self._rows = rows
        self._draw = draw

    def __call__(
        self,
        slices: Sequence[ScheduledSlice],
        hidden: torch.Tensor,
        logits: Logits,
        grammars: SequenceGrammars,
    ) -> list[ReadExplained]:
        """Launch those of a step with hidden states [T, hidden]. Return how to read each."""
        found: list[ReadExplained] = []
        end = 0
        for s in slices:
            end += s.count
            explain = self._rows.explain.get(s.row)
            if explain is None:
                continue
            first_row = explain.first_row(self._rows.prompt_length[s.row])
            num_skipped = max(0, first_row - s.start)  # tokens before the answer
            if num_skipped >= s.count:
                continue
            tokens = self._rows.tokens[s.row, : s.start + s.count]
            index = s.start + num_skipped - first_row
            pending = PendingExplanation(s.id, explain, tokens, first_row + 1, index)
            rows = logits(hidden[end - s.count + num_skipped : end])
            indices = range(index, index + len(rows))
            pending.launch(rows, self._draw, grammars.replay(s.id, explain.answer, indices))
            found.append(pending.read)
        return found
