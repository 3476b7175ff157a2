"""Find fixed texts in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Found(NamedTuple):
    """Where the text before a terminal ends, the terminal, and where it ends.

    `terminal` is None if there is none. The text from `before` on may then begin one.
    """

    before: int
    terminal: str | None
    end: int


class Terminals:
    """A set of texts. The leftmost is found, and the longest of those that begin there.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, terminals: Iterable[str]) -> None:
        longest_first = sorted(set(terminals), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._beginnings = {t[:size] for t in longest_first for size in range(1, len(t))}
        self._longest = len(longest_first[0]) if longest_first else 0
        self._first_chars = frozenset(terminal[0] for terminal in longest_first)

    def are_absent(self, text: str) -> bool:
        """Return whether no terminal can begin in `text`. A quick look: False may be wrong."""
        return self._first_chars.isdisjoint(text)

    def find(self, text: str, start: int, *, is_end: bool, within: int | None = None) -> Found:
        """Find the first terminal at or after `start`. With `is_end` no more text will come.

        `within` limits the search to terminals that begin in that number of characters.
        """
        if not self._longest:
            return Found(len(text), None, len(text))
        end = len(text)
        if within is not None and start + within + self._longest < end:
            end = start + within + self._longest
            is_end = True
        match = self._pattern.search(text, start, end)
        held = end if is_end else self._unfinished(text, start)
        if match is None or held <= match.start():
            return Found(held, None, held)
        return Found(match.start(), match.group(), match.end())

    def _unfinished(self, text: str, start: int) -> int:
        """Return where the earliest possible beginning of a terminal at the end of `text` is."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._beginnings:
                return at
        return len(text)
