"""Prose: text between marks, without the white space around it."""

from __future__ import annotations

from collections.abc import Callable

SPACE = " \t\r\n"
BETWEEN_CALLS = frozenset(SPACE + ",;}]")


class Prose:
    """Passes text on. White space at its end is held back, because a mark may follow."""

    def __init__(self, emit: Callable[[str], None], *, strips: bool) -> None:
        self._emit = emit
        self._strips = strips  # drops white space at the beginning
        self._held: list[str] = []

    @property
    def space(self) -> str:
        """The white space that is held back."""
        return "".join(self._held)

    def begin(self, *, strips: bool = True) -> None:
        """Begin another text. Text that is held back is dropped."""
        self._held.clear()
        self._strips = strips

    def push(self, text: str) -> None:
        if self._strips and not self._held:
            text = text.lstrip(SPACE)
        kept = text.rstrip(SPACE)
        if kept:
            self._emit(self.space + kept)
            self.begin(strips=False)
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def hold(self, text: str) -> None:
        """Hold back text that is dropped like white space if a mark follows."""
        if self._strips and not self._held:
            text = text.lstrip(SPACE)
        if text:
            self._held.append(text)

    def end(self) -> None:
        """Pass on what is held back: no mark follows."""
        if self._held:
            self._emit(self.space)
            self.begin(strips=False)
