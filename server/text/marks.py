"""Special tokens inside text: each becomes one character that no text contains.

The text "<tool_call>" and the token of that name then differ, and a token is never cut into pieces.
The characters are Unicode's noncharacters, which are reserved for use inside a program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

# The last two of each plane are noncharacters, too. Those of the first plane occur in real files.
PLANE_ENDS = [chr(0x10000 * plane + end) for plane in range(1, 17) for end in (0xFFFE, 0xFFFF)]
CHARACTERS = [*map(chr, range(0xFDD0, 0xFDF0)), *PLANE_ENDS]
NONE_LEFT = "\N{REPLACEMENT CHARACTER}"  # for such a character that a model writes itself
_FOREIGN = dict.fromkeys(map(ord, CHARACTERS), NONE_LEFT)
NUMBERED = re.compile(r"\d")


class Marks:
    """The marks of some tokens of a vocabulary.

    `by_text` and `ids` have the tokens of a format; `by_id` also has others, so that they are not
    lost where their text is shown.
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        special: Iterable[int] = (),
        others: Mapping[str, int] | None = None,
    ) -> None:
        """`tokens` maps texts of tokens to their ids; the text of `special` ones is not shown.

        `others` get the characters that are left. Tokens with a number, mostly reserved, come last.
        """
        hidden = frozenset(special)
        longest_first = sorted(tokens, key=len, reverse=True)
        self.by_text = dict(zip(longest_first, CHARACTERS, strict=False))
        self.ids = {mark: tokens[text] for text, mark in self.by_text.items()}
        left = CHARACTERS[len(self.by_text) :]
        more = [text for text in others or () if text not in tokens]
        more.sort(key=lambda text: NUMBERED.search(text) is not None)
        every = {**(others or {}), **tokens}
        self._every = {**self.by_text, **dict(zip(more, left, strict=False))}
        self.by_id = {every[text]: mark for text, mark in self._every.items()}
        self._texts = {ord(mark): text for text, mark in self._every.items()}
        self._quoted = {code: json.dumps(text)[1:-1] for code, text in self._texts.items()}
        self._shown = {
            ord(mark): "" if every[text] in hidden else text for text, mark in self._every.items()
        }
        self._pattern = _any_of(self.by_text)
        self._every_pattern = _any_of(self._every)

    def encode(self, literal: str) -> str:
        """Return `literal` with a mark in place of each token of the format in it."""
        return self._pattern.sub(lambda match: self.by_text[match.group()], literal)

    def encode_shown(self, text: str, *, special: bool) -> str:
        """Return `text` with a mark in place of each token in it, if all tokens in it are shown.

        With `special`, all are.
        """
        encoded = self._every_pattern.sub(lambda match: self._every[match.group()], text)
        return encoded if special or self.shown(encoded) == text else text

    def text(self, marked: str) -> str:
        """Return the text with all tokens in it."""
        return marked if marked.isascii() else marked.translate(self._texts)

    def quoted(self, marked: str) -> str:
        """Return what `text` returns, with JSON's escapes in the tokens, for a quoted text."""
        return marked if marked.isascii() else marked.translate(self._quoted)

    def shown(self, marked: str) -> str:
        """Return the text without special tokens."""
        return marked if marked.isascii() else marked.translate(self._shown)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def without_marks(text: str) -> str:
    """Replace characters that would look like marks."""
    return text if text.isascii() else text.translate(_FOREIGN)


NO_MARKS = Marks({})
