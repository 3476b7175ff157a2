"""HeadDrafter: drafts by the prediction head of a checkpoint, which follows the model's steps.

The head's KV is one more layer of the model's cache. So it follows a sequence through chunks,
prefix hits and preemptions without any bookkeeping. Position p of it holds the hidden state at p
and the token at p + 1, so it can be computed once that token is known. It waits for a draft or for
the end of a block, because the head reads its weights once for one position or for many. Only full
blocks are shared. Hidden states of positions that wait are kept by row. Where drafted tokens were
wrong, later steps overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.models.base import PredictionHead
from engine.runner.batch import build_batch
from engine.runner.forward import STEP_TOKENS_MULTIPLE
from engine.runner.model_runner import ModelRunner
from engine.scheduling.sequence import Sequence as Record
from engine.scheduling.step import ScheduledSlice, Step


class Waiting(NamedTuple):
    """Hidden states [n, hidden] of a row's positions from `first` on; the head computes them next.

    The last position is computed again with a draft, because the draft needs the head's result.
    """

    first: int
    hidden: torch.Tensor

    @property
    def end(self) -> int:
        return self.first + len(self.hidden)

    def last(self) -> Waiting:
        return Waiting(self.end - 1, self.hidden[-1:].clone())


class HeadDrafter:
    """Drafts for up to `most_streams` sequences at once, with their sampling parameters.

    Penalties, biases and grammars are left out. A drafted token costs one pass of the head, and
    the logits of one token.
    """

    def __init__(self, runner: ModelRunner, head: PredictionHead, most_streams: int) -> None:
        self._runner = runner
        self._head = head
        self._most_streams = most_streams
        self._waiting: dict[int, Waiting] = {}  # by row
        self._streams = 0  # rows of the last step
        runner.observers.append(self._follow)

    def _follow(self, step: Step, hidden: torch.Tensor) -> None:
        """Take the hidden states [T, hidden] of a step whose sampled tokens are in the rows."""
        for new in step.new_rows:
            self._waiting.pop(new.row, None)
        size = self._runner.kv.block_size
        due: dict[int, Waiting] = {}
        done = self._streams = 0
        for row, start, count in _runs(step.slices):
            waiting = self._joined(row, start, hidden[done : done + count])
            done += count
            self._streams += 1
            if waiting.end // size > start // size:  # a block is full
                due[row] = waiting
                waiting = waiting.last()
            self._waiting[row] = waiting
        if due:
            self._compute(due)

    def _joined(self, row: int, start: int, hidden: torch.Tensor) -> Waiting:
        """Return the waiting positions of a row, with those from `start` on."""
        known = self._waiting.get(row)
        if known is None or not known.first <= start <= known.end:
            return Waiting(start, hidden.clone())
        return Waiting(known.first, torch.cat((known.hidden[: start - known.first], hidden)))

    @torch.inference_mode()
    def __call__(self, sequence: Record, most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow the known tokens of a running sequence."""
        row, known = sequence.row, len(sequence.tokens)
        waiting = self._waiting.get(row)
        is_late = sequence.num_tokens > known  # a token is in flight
        if is_late or waiting is None or self._streams > self._most_streams:
            return []
        # The last known token was sampled from the hidden state before it.
        count = known - 1 - waiting.first
        if not 0 < count <= len(waiting.hidden):
            return []
        waiting = Waiting(waiting.first, waiting.hidden[:count])
        self._waiting[row] = waiting.last()
        hidden = self._compute({row: waiting})[-1:]
        stops = sequence.params.stop_token_ids
        drafted: list[int] = []
        while True:
            token = self._draw(row, hidden, known + len(drafted))
            if token < 0:  # the logits are not finite
                return drafted
            drafted.append(token)
            if len(drafted) == most or token in stops:
                return drafted
            drafting = Waiting(known - 2 + len(drafted), hidden)
            hidden = self._compute({row: drafting}, torch.tensor([token]))

    def _compute(self, parts: dict[int, Waiting], ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the head's hidden states [T, hidden] of positions, by row; write their KV.

        `ids` [T] are the tokens behind them, if the rows do not know these.
        """
        ordered = sorted(parts.items(), key=lambda part: len(part[1].hidden) > 1)
        slices = [
            ScheduledSlice(0, 0, row, each.first, len(each.hidden), samples=True)
            for row, each in ordered
        ]
        runner = self._runner
        if ids is None:
            tokens = runner.rows.tokens
            ids = torch.cat([tokens[s.row, s.start + 1 :][: s.count] for s in slices]).long()
        hidden = torch.cat([each.hidden for _, each in ordered])
        count = len(hidden)
        batch = build_batch(Step(tuple(slices)), runner.rows, runner.kv, runner.backend)
        padded = runner.forward.round_up(count, STEP_TOKENS_MULTIPLE)
        batch = replace(batch, input_ids=ids).padded(padded)
        hidden = F.pad(hidden, (0, 0, 0, padded - count))
        return self._head(batch.input_ids, hidden, batch)[:count]

    def _draw(self, row: int, hidden: torch.Tensor, position: int) -> int:
        """Draw the token at a position of a row from hidden [1, hidden], as the model would."""
        runner = self._runner
        index = torch.tensor([row])
        params = runner.rows.draw_params(index, torch.zeros_like(index))
        params = params._replace(positions=torch.full_like(params.positions, position))
        return int(runner.draw(runner.logits(hidden), params).item())


def _runs(slices: Sequence[ScheduledSlice]) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, count) of the tokens of each sequence, drafted ones included."""
    row = start = count = 0
    for s in slices:
        if s.draft >= 0:
            count += s.count
            continue
        if count:
            yield row, start, count
        row, start, count = s.row, s.start, s.count
    if count:
        yield row, start, count
