"""HeadDrafter: drafts by the prediction head of a checkpoint, which follows the model's steps.

The head's KV is one more layer of the model's cache. So it follows a sequence through chunks,
prefix hits and preemptions without any bookkeeping. Position p of it holds the hidden state at p
and the token at p + 1, so it can be computed once that token is known. It waits for a draft or for
the end of a block, because the head reads its weights once for one position or for many. Only full
blocks are shared. Hidden states of positions that wait are kept by row. Where drafted tokens were
wrong, later steps overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Hidden states [n, hidden] of a row's positions from `first` on, not computed by the head."""

    first: int
    hidden: torch.Tensor

    @property
    def end(self) -> int:
        return self.first + len(self.hidden)

    def but(self, count: int) -> Waiting:
        """Return the same without the first `count` positions, which are computed."""
        return Waiting(self.first + count, self.hidden[count:].clone())


@dataclass(slots=True)
class Draft:
    """Tokens drafted behind `known` tokens, and the head's hidden state [1, hidden] of the last."""

    known: int
    tokens: list[int]
    hidden: torch.Tensor


class HeadDrafter:
    """Drafts with the sampling parameters of sequences, without penalties, biases and grammars.

    The first token is drafted for all sequences of a step at once, further ones for each alone.
    """

    def __init__(self, runner: ModelRunner, head: PredictionHead) -> None:
        self._runner = runner
        self._head = head
        self._waiting: dict[int, Waiting] = {}  # by row, as are the other two
        self._drafts: dict[int, Draft] = {}  # behind the last step
        self._sampled: list[int] = []  # rows of the last step whose next token is known
        runner.observers.append(self._follow)

    def _follow(self, step: Step, hidden: torch.Tensor) -> None:
        """Take the hidden states [T, hidden] of a step whose sampled tokens are in the rows."""
        for new in step.new_rows:
            self._waiting.pop(new.row, None)
        self._drafts.clear()
        self._sampled.clear()
        size = self._runner.kv.block_size
        due: dict[int, Waiting] = {}
        done = 0
        for first, *drafted in _by_sequence(step.slices):
            row, start = first.row, first.start
            count = first.count + self._num_right(drafted)
            waiting = self._joined(row, start, hidden[done : done + count])
            done += first.count + len(drafted)
            if waiting.end // size > start // size:  # a block is full
                due[row] = waiting
                # A draft needs the head's result at the last position, and computes it again.
                waiting = waiting.but(len(waiting.hidden) - 1)
            self._waiting[row] = waiting
            if first.samples:
                self._sampled.append(row)
        if due:
            self._compute(due)

    def _num_right(self, drafted: Sequence[ScheduledSlice]) -> int:
        """Return how many leading drafted tokens of a sequence were sampled."""
        if not drafted:
            return 0
        first = drafted[0]
        sampled = self._runner.rows.tokens[first.row, first.start :][: len(drafted)].tolist()
        pairs = enumerate(zip(drafted, sampled, strict=True))
        return next((i for i, (s, token) in pairs if s.draft != token), len(drafted))

    def _joined(self, row: int, start: int, hidden: torch.Tensor) -> Waiting:
        """Return the waiting positions of a row, with those from `start` on."""
        known = self._waiting.get(row)
        if known is None or known.end != start:
            return Waiting(start, hidden.clone())
        return Waiting(known.first, torch.cat((known.hidden, hidden)))

    @torch.inference_mode()
    def __call__(self, sequence: Record, most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow the known tokens of a running sequence."""
        if sequence.num_tokens > len(sequence.tokens):
            return []  # a token is in flight
        if self._sampled:
            self._draft_first()
        row = sequence.row
        draft = self._drafts.get(row)
        if draft is None or draft.known != len(sequence.tokens):
            return []
        tokens, stops = draft.tokens, sequence.params.stop_token_ids
        # A token is -1 if the logits are not finite.
        while len(tokens) < most and tokens[-1] >= 0 and tokens[-1] not in stops:
            # The head's last state is that of the position before the last drafted token.
            drafting = Waiting(draft.known + len(tokens) - 2, draft.hidden)
            draft.hidden = self._compute({row: drafting}, torch.tensor(tokens[-1:]))
            tokens += self._draw([row], draft.hidden, [draft.known + len(tokens)])
        return [token for token in tokens[:most] if token >= 0]

    def _draft_first(self) -> None:
        """Draft one token behind each sequence of the last step, once."""
        parts = {row: self._waiting[row] for row in self._sampled}
        self._sampled.clear()
        hidden = self._compute(parts)
        ends = torch.tensor([len(each.hidden) for each in parts.values()]).cumsum(0)
        hidden = hidden.index_select(0, ends - 1)
        # The next token of position p is p + 1, and the head predicts the one behind it.
        known = [each.end + 1 for each in parts.values()]
        tokens = self._draw(list(parts), hidden, known)
        for index, (row, token) in enumerate(zip(parts, tokens, strict=True)):
            self._drafts[row] = Draft(known[index], [token], hidden[index : index + 1])
            self._waiting[row] = parts[row].but(len(parts[row].hidden))

    def _compute(self, parts: dict[int, Waiting], ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the head's hidden states [T, hidden] of positions, by row; write their KV.

        `ids` [T] are the tokens behind them, if the rows do not know these.
        """
        slices = [
            ScheduledSlice(0, 0, row, each.first, len(each.hidden), samples=True)
            for row, each in parts.items()
        ]
        runner = self._runner
        if ids is None:
            tokens = runner.rows.tokens
            ids = torch.cat([tokens[s.row, s.start + 1 :][: s.count] for s in slices]).long()
        hidden = torch.cat([each.hidden for each in parts.values()])
        count = len(hidden)
        batch = build_batch(Step(tuple(slices)), runner.rows, runner.kv, runner.backend)
        padded = runner.forward.round_up(count, STEP_TOKENS_MULTIPLE)
        batch = replace(batch, input_ids=ids).padded(padded)
        hidden = F.pad(hidden, (0, 0, 0, padded - count))
        return self._head(batch.input_ids, hidden, batch)[:count]

    def _draw(self, rows: list[int], hidden: torch.Tensor, positions: list[int]) -> list[int]:
        """Draw the tokens at these positions of rows from hidden [R, hidden]."""
        runner = self._runner
        params = runner.rows.draw_params.select(torch.tensor(rows))
        params = params._replace(positions=torch.tensor(positions))
        drawn: list[int] = runner.draw(runner.logits(hidden), params).tolist()
        return drawn


def _by_sequence(slices: Sequence[ScheduledSlice]) -> list[list[ScheduledSlice]]:
    """Return the slices of each sequence: the first, and those of drafted tokens behind it."""
    found: list[list[ScheduledSlice]] = []
    for s in slices:
        if s.draft >= 0:
            found[-1].append(s)
        else:
            found.append([s])
    return found
