"""Pace: how many tokens to draft for a sequence, given what became of the drafts before."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_LENGTH = 2
LONGEST_PAUSE = 32


class Pace:
    """Drafts get longer while they are right. After wrong ones come pauses, each twice as long.

    A draft that is wrong costs a part of a step. With pauses the wrong drafts of an answer that
    repeats nothing cost about a hundredth of its time.
    """

    def __init__(self) -> None:
        self._length = FIRST_LENGTH
        self._pause = 0  # steps until the next draft
        self._next_pause = 1

    def wanted(self) -> int:
        """Return how many tokens to draft in this step; called once a step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def judge(self, drafted: int, accepted: int) -> None:
        """Learn that the first `accepted` of `drafted` tokens were right."""
        if not accepted:
            self._length = max(1, self._length // 2)
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        elif accepted == drafted:
            self._length = 2 * drafted
            self._next_pause = max(1, self._next_pause // 2)
        else:
            self._length = accepted + 1


@dataclass(slots=True)
class Drafting:
    """What is kept about the drafts of one sequence."""

    num_added: int = 0  # tokens whose n-grams are in the pool
    num_drafted: int = 0  # tokens of the last draft
    num_accepted: int = 0  # those of them that were right
    is_forced: bool = False  # a grammar left no choice, which says nothing about later drafts
    pace: Pace = field(default_factory=Pace)
