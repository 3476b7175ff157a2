"""Find stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Text that is safe to emit, and the stop string that ends it, or None."""

    text: str
    stop: str | None


class StopMatcher:
    """Find stop strings in a text that arrives in pieces. The result does not depend on the cuts.

    The stop string that is complete first wins, because generation ends there. If two end at the
    same character, the longer one wins. With `include` the emitted text contains the stop string.
    Stop strings must not be empty.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, too_early: bool = False) -> Match:
        """Return the text that is safe to emit, and the stop string if one was found.

        After a match the rest of the text is dropped, and nothing is left to push or flush. With
        `too_early`, a stop string that ends in this text does not match; one that only begins in
        it may match later.
        """
        if not self._stops:
            return Match(text, None)
        seen = len(self._held)
        text = self._held + text
        ends = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if ends and not too_early:
            end, at, stop = min(ends)
            self._held = ""
            return Match(text[: end if self._include else at], stop)
        safe = min(self._safe_length(text, stop) for stop in self._stops)
        self._held = text[safe:]
        return Match(text[:safe], None)

    def flush(self) -> str:
        """Return the text held back as the possible start of a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _safe_length(text: str, stop: str) -> int:
        """Return where the longest suffix of `text` that is a proper prefix of `stop` begins.

        Returns len(text) if there is no such suffix.
        """
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return at if at >= 0 else len(text)
