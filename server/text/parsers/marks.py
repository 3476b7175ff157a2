"""Special tokens inside text: each becomes one character that no text contains.

The text "<tool_call>" and the token of that name then differ, and a token is never cut into pieces.
The characters are Unicode's noncharacters, which are reserved for use inside a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

CHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
NONE_LEFT = "\N{REPLACEMENT CHARACTER}"  # for such a character that a model writes itself
_FOREIGN = dict.fromkeys(map(ord, CHARACTERS), NONE_LEFT)


class Marks:
    """The marks of some tokens of a vocabulary."""

    def __init__(self, tokens: Mapping[str, int], special: Iterable[int] = ()) -> None:
        """`tokens` maps texts of tokens to their ids; the text of `special` ones is not shown."""
        hidden = frozenset(special)
        longest_first = sorted(tokens, key=len, reverse=True)
        self.by_text = dict(zip(longest_first, CHARACTERS, strict=False))
        self.by_id = {tokens[text]: mark for text, mark in self.by_text.items()}
        self.ids = {mark: tokens[text] for text, mark in self.by_text.items()}
        self._texts = {ord(mark): text for text, mark in self.by_text.items()}
        self._shown = {
            ord(mark): "" if tokens[text] in hidden else text for text, mark in self.by_text.items()
        }
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, literal: str) -> str:
        """Return `literal` with a mark in place of each token in it."""
        return self._pattern.sub(lambda match: self.by_text[match.group()], literal)

    def encode_shown(self, text: str, *, special: bool) -> str:
        """Return what `encode` returns, if all tokens in the text are shown; else the text.

        With `special`, all are.
        """
        encoded = self.encode(text)
        return encoded if special or self.shown(encoded) == text else text

    def text(self, marked: str) -> str:
        """Return the text with all tokens in it."""
        return marked if marked.isascii() else marked.translate(self._texts)

    def shown(self, marked: str) -> str:
        """Return the text without special tokens."""
        return marked if marked.isascii() else marked.translate(self._shown)


def without_marks(text: str) -> str:
    """Replace characters that would look like marks."""
    return text if text.isascii() else text.translate(_FOREIGN)


NO_MARKS = Marks({})
