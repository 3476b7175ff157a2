"""Speculation: tokens that are assumed to follow, computed in the same step and then checked.

The model computes a draft's tokens as if they were known, each as a slice of its own, and samples
behind each. As long as the sampled token is the drafted one, the next sample is valid too. So a
step yields one token more for each draft token that was right. Wrong ones leave nothing behind:
their KV is overwritten. Drafts decide how fast an answer is, never what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from engine.scheduling.block_tables import BlockTables
from engine.scheduling.drafts import MOST_ROWS
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import NO_STATES, NewDraft, ScheduledSlice
from engine.scheduling.step_builder import StepBuilder

# Returns tokens that may follow a sequence, at most the number given. Those in flight count too.
Drafter = Callable[[Sequence, int], Seq[int]]


class Grammars(Protocol):
    """The grammars of constrained requests, each at the last known token of its sequence."""

    def is_ready(self, request_id: int, num_tokens: int) -> bool:
        """Return whether the next token can be sampled without waiting for the grammar."""

    def forced(self, request_id: int) -> Seq[int]:
        """Return the next tokens if the grammar leaves no choice."""

    def num_allowed(self, request_id: int, draft: Seq[int]) -> int:
        """Return how many leading tokens of a draft the grammar allows."""


class Speculation:
    """Schedules drafts and checks them. Without a drafter there are none."""

    def __init__(
        self, tables: BlockTables, drafter: Drafter | None, grammars: Grammars | None
    ) -> None:
        self.num_drafted = self.num_accepted = 0  # tokens, since the start
        self.num_drafts = 0  # since the start
        self.num_wrong = 0  # drafted tokens of the last step that was retired
        self._grammars = grammars
        self._tables = tables
        self._drafter = drafter
        self._most = 0  # tokens of a draft in this step
        self._judged: list[Sequence] = []  # with drafts in the step that is being retired

    def begin_step(self, num_decodes: int) -> None:
        """Divide the rows of a step among its decodes."""
        self._most = MOST_ROWS // max(num_decodes, 1) - 1 if self._drafter else 0

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """Return up to `most` tokens to assume behind the last token of a decoding sequence."""
        is_decode = sequence.num_tokens > sequence.prompt_length
        most = min(most, self._most, sequence.num_samples_left - 1)
        if most <= 0 or not is_decode or sequence.explain or sequence.ablation_key:
            return []
        sequence.drafts.is_forced = False
        draft = self._allowed if sequence.is_constrained else self._likely
        found = draft(sequence, most)
        stops = sequence.params.stop_token_ids
        first_stop = next((i for i, token in enumerate(found) if token in stops), len(found))
        return found[:first_stop]

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether a running sequence may be in the next step: its grammar is not late."""
        if self._grammars is None or not sequence.is_constrained:
            return True
        return self._grammars.is_ready(sequence.id, sequence.num_tokens)

    def _allowed(self, sequence: Sequence, most: int) -> list[int]:
        """Draft what a grammar forces, or else what is likely and allowed."""
        if self._grammars is None or sequence.num_tokens > len(sequence.tokens):
            return []  # the grammar does not know a token that is in flight
        forced = list(self._grammars.forced(sequence.id)[:most])
        sequence.drafts.is_forced = bool(forced)
        draft = forced or self._likely(sequence, most)
        return draft[: self._grammars.num_allowed(sequence.id, draft)] if draft else []

    def _likely(self, sequence: Sequence, most: int) -> list[int]:
        most = min(most, sequence.drafts.num_wanted())
        if most <= 0 or self._drafter is None:
            return []
        # Tokens in flight are drafted too, and then left out.
        num_unknown = sequence.num_tokens - len(sequence.tokens)
        return list(self._drafter(sequence, num_unknown + most)[num_unknown:])

    def take(
        self, builder: StepBuilder, sequence: Sequence, draft: Seq[int], *, spare: int
    ) -> None:
        """Schedule a draft behind the last token of a sequence, whose slice is scheduled.

        It is dropped if that left fewer than `spare` blocks.
        """
        missing = self._tables.num_missing(sequence, len(draft))
        if missing and self._tables.pool.num_available < missing + spare:
            draft = ()
        builder.add_blocks(self._tables.extend(sequence, len(draft)))
        row, end = sequence.row, sequence.num_computed
        builder.new_drafts.append(NewDraft(row, end, tuple(draft)))
        for start, token in enumerate(draft, end):
            states = NO_STATES
            if self._tables.states is not None:
                states = self._tables.states.take(sequence, start, 1, is_draft=True)
            part = sequence.slice_at(start, 1, samples=True, draft=token, states=states)
            builder.add_slice(part)
        sequence.drafts.num_drafted, sequence.drafts.num_accepted = len(draft), 0
        sequence.drafted_behind = end - 1 if draft else -1
        sequence.row_is_stale = sequence.last_was_chunk = bool(draft)

    def confirms(self, sequence: Sequence, scheduled: ScheduledSlice) -> bool:
        """Return whether what a slice has sampled is valid: all drafted tokens before it are right.

        The slices of a sequence come in order, each after the token of the one before is known.
        """
        if scheduled.draft < 0:
            if scheduled.start == sequence.drafted_behind:
                self._judged.append(sequence)
                sequence.drafted_behind = -1
            return True
        if not sequence.accepts(scheduled):
            return False
        if not sequence.num_computed % self._tables.block_size:
            self._tables.register(sequence)
        sequence.drafts.num_accepted += 1
        return True

    def end_step(self) -> None:
        """Learn from the drafts of the step that was retired."""
        self.num_wrong = 0
        self.num_drafts += len(self._judged)
        for drafts in (sequence.drafts for sequence in self._judged):
            self.num_drafted += drafts.num_drafted
            self.num_accepted += drafts.num_accepted
            self.num_wrong += drafts.num_drafted - drafts.num_accepted
            drafts.judge()
        self._judged.clear()
