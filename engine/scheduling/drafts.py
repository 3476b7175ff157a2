"""Drafts: those of one sequence, and how many tokens the next one has."""

from __future__ import annotations

# The most sequences and drafted tokens of a step that has drafts. Up to this many, reading the
# weights takes most of a step's time.
MOST_ROWS = 8
FIRST_LENGTH = 2
LONGEST_PAUSE = 32


class Drafts:
    """Drafts get longer while they are right. After wrong ones come pauses, each twice as long.

    A draft that is wrong costs a part of a step. With pauses the wrong drafts of an answer that
    repeats nothing cost about a hundredth of its time.
    """

    def __init__(self) -> None:
        self.num_added = 0  # tokens of the sequence whose n-grams are in the pool
        self.num_drafted = 0  # tokens of the last draft
        self.num_accepted = 0  # those of them that were right
        self.is_forced = False  # a grammar left no choice, which says nothing about later drafts
        self._length = FIRST_LENGTH
        self._pause = 0  # steps until the next draft
        self._next_pause = 1

    def num_wanted(self) -> int:
        """Return how many tokens to draft in this step; called once a step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def judge(self) -> None:
        """Learn from the last draft, whose first `num_accepted` tokens were right."""
        if self.is_forced:
            return
        if not self.num_accepted:
            self._length = max(1, self._length // 2)
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        elif self.num_accepted == self.num_drafted:
            self._length = 2 * self.num_drafted
            self._next_pause = max(1, self._next_pause // 2)
        else:
            self._length = self.num_accepted + 1
