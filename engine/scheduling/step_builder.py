"""StepBuilder: the step that is being scheduled, and what is left of its token budgets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from engine.protocol.outputs import PrefillChunk
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import (
    BlockCopy,
    EncoderInput,
    NewBlocks,
    NewDraft,
    NewRow,
    ScheduledSlice,
    Step,
)


class StepBuilder:
    """Collects the parts of one step. `budget` and `encoder_budget` are in tokens.

    A chunk may exceed the budget by `image_budget` to end with a whole image; 0: images may be cut.
    """

    def __init__(self, budget: int, encoder_budget: int, image_budget: int = 0) -> None:
        self.budget = budget
        self.encoder_budget = self.encoder_tokens = encoder_budget
        self.image_budget = self.image_tokens = image_budget
        self.slices: list[ScheduledSlice] = []
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[NewBlocks] = []
        self.new_drafts: list[NewDraft] = []
        self.scrub: list[int] = []
        self.copies: list[BlockCopy] = []
        self.encoder_inputs: list[EncoderInput] = []
        self.prefills: list[PrefillChunk] = []
        self.cut_prompts: list[Sequence] = []  # prompts too long for this step

    def add_slice(self, scheduled: ScheduledSlice) -> None:
        """Add a slice whose tokens are taken from the budget."""
        self.slices.append(scheduled)
        self.budget -= scheduled.count

    def lacking_budget(self, waiting: Sequence) -> Literal["encoder", "budget", ""]:
        """Return which budget keeps a sequence from being admitted, or "" if none does.

        Only the first encoder prompt of a step may exceed its budget, and only the first image.
        """
        has_encoder_budget = len(waiting.encoder_prompt) <= self.encoder_budget
        if not has_encoder_budget and self.encoder_budget < self.encoder_tokens:
            return "encoder"
        return "" if self.has_image_budget(waiting) else "budget"

    def has_image_budget(self, sequence: Sequence) -> bool:
        """Return whether a sequence may exceed the budget if an image of it has to be whole."""
        has_images = bool(sequence.images) and sequence.num_computed < sequence.prompt_length
        return not has_images or self.image_budget == self.image_tokens

    def with_whole_images(self, prompt: Sequence, count: int, most: int) -> int:
        """Return how many tokens a chunk of `count` has if it cuts no image.

        It ends before the image. If it would be empty then, it ends behind the image, if need be
        beyond `most`, which is what the budget has for it.
        """
        start = prompt.num_computed
        run = prompt.image_run_across(start + count) if self.image_tokens else None
        if run is None:
            return count
        first, past = run
        if first > start:
            return first - start
        count = past - start
        beyond = max(0, count - most)
        assert beyond <= self.image_budget, "see has_image_budget"
        self.image_budget -= beyond
        self.budget += beyond
        return count

    def add_blocks(self, added: Iterable[NewBlocks]) -> None:
        """Add newly allocated blocks of a running sequence."""
        for blocks in added:
            self.new_blocks.append(blocks)
            self.scrub += blocks.blocks

    def add_row(self, sequence: Sequence, fresh: list[int]) -> None:
        """Add the row and the block tables of an admitted sequence.

        Its `fresh` blocks are newly allocated; the others are cached, or copied from cached ones.
        """
        row = NewRow(
            sequence.row,
            tuple(sequence.tokens),
            sequence.prompt_length,
            sequence.params,
            len(sequence.encoder_prompt),
            sequence.explain,
            sequence.adapter_slot,
            sequence.images,
        )
        self.new_rows.append(row)
        for group, table in enumerate(sequence.tables):
            self.new_blocks.append(NewBlocks(sequence.row, group, 0, tuple(table)))
        self.scrub += fresh
        self.copies += sequence.copies
        sequence.copies = []

    def add_encoder_prompt(self, sequence: Sequence, cross_groups: list[int]) -> None:
        """Let the step encode a sequence's encoder prompt into its cross-attention blocks."""
        blocks = tuple((number, tuple(sequence.tables[number])) for number in cross_groups)
        self.encoder_inputs.append(EncoderInput(sequence.id, sequence.encoder_prompt, blocks))
        self.encoder_budget -= len(sequence.encoder_prompt)

    def build(self) -> Step | None:
        """Return the step, with decodes before chunks; None if there is nothing to compute."""
        if not self.slices and not self.encoder_inputs:
            return None
        if self.prefills:
            self.slices.sort(key=lambda s: s.count > 1)  # stable: each kind stays in rank order
        return Step(
            tuple(self.slices),
            tuple(self.new_rows),
            tuple(self.new_blocks),
            tuple(self.new_drafts),
            tuple(self.scrub),
            tuple(self.copies),
            tuple(self.encoder_inputs),
            tuple(self.prefills),
        )
