"""Read a regular expression as fixed texts and gaps, to find the marks of a format in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

MAX_LENGTH = 2000
MAX_ALTERNATIVES = 64
MAX_DEPTH = 8
SPACES = re.compile(r"(\\[sntr]|[ \n\t\r]|\[(\\[sntr]|[ \n\t\r])+\])([*+?]\??|\{\d*,?\d*\}\??)")
ANY = re.compile(
    r"(\.|\\[wdsWDS]|\[(?:\\.|[^\]\\])(?:\\.|[^\]\\])*\])(?:[*+?][?+]?|\{\d*,?\d*\}\??)?"
)
NAMED_GROUP = re.compile(r"\(\?P<(\w+)>")
EDGES = ("^", "$", r"\A", r"\Z", r"\b")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class Piece(NamedTuple):
    """A part of a pattern. `text` is a fixed text, the name of a group, or the pattern itself."""

    kind: Literal["text", "space", "group", "any", "edge"]
    text: str


class PatternError(ValueError):
    """The pattern has a part that is no fixed text, gap or named group."""


def alternatives(pattern: str) -> list[list[Piece]]:
    """Return the pieces of each text form that a pattern allows. Raises PatternError."""
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"longer than {MAX_LENGTH} characters")
    reader = _Reader(pattern)
    found = reader.alternation(depth=0)
    if reader.at < len(pattern):
        raise PatternError("unbalanced parenthesis")
    return [_merged(pieces) for pieces in found]


def texts(pieces: Sequence[Piece]) -> list[str]:
    """Return the fixed texts."""
    return [piece.text for piece in pieces if piece.kind == "text"]


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbouring texts."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and piece.kind == "text" == merged[-1].kind:
            merged[-1] = Piece("text", merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return merged


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternation(self, depth: int) -> list[list[Piece]]:
        if depth > MAX_DEPTH:
            raise PatternError("too many parentheses")
        found = self._sequence(depth)
        while self._next() == "|":
            self.at += 1
            found += self._sequence(depth)
            self._check_count(found)
        return found

    def _sequence(self, depth: int) -> list[list[Piece]]:
        """Return the forms of what stands before the next `|` or `)`."""
        found: list[list[Piece]] = [[]]
        while self._next() not in ("", "|", ")"):
            forms = self._item(depth)
            found = [[*a, *b] for a, b in itertools.product(found, forms)]
            self._check_count(found)
        return found

    def _check_count(self, found: Sequence[object]) -> None:
        if len(found) > MAX_ALTERNATIVES:
            raise PatternError(f"more than {MAX_ALTERNATIVES} alternatives")

    def _next(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _item(self, depth: int) -> list[list[Piece]]:
        for edge in EDGES:
            if self._pattern.startswith(edge, self.at):
                self.at += len(edge)
                return [[Piece("edge", edge)]]
        space = SPACES.match(self._pattern, self.at)
        if space is not None:
            self.at = space.end()
            return [[Piece("space", space.group())]]
        any_text = ANY.match(self._pattern, self.at)
        if any_text is not None:
            self.at = any_text.end()
            return [[Piece("any", any_text.group())]]
        if self._next() == "(":
            return self._group(depth)
        return [[Piece("text", self._character())]]

    def _group(self, depth: int) -> list[list[Piece]]:
        named = NAMED_GROUP.match(self._pattern, self.at)
        if named is not None:
            self._skip_group()
            self._refuse_repeat()
            return [[Piece("group", named.group(1))]]
        if not self._pattern.startswith("(?:", self.at):
            raise PatternError(f"{self._pattern[self.at : self.at + 3]!r} at {self.at}")
        self.at += 3
        found = self.alternation(depth + 1)
        if self._next() != ")":
            raise PatternError("unbalanced parenthesis")
        self.at += 1
        if self._next() == "?":
            self.at += 1
            found = [*found, []]
        self._refuse_repeat()
        return found

    def _skip_group(self) -> None:
        """Go on after the closing parenthesis of the group that begins here."""
        level = 0
        is_class = False
        while self.at < len(self._pattern):
            char = self._next()
            self.at += 2 if char == "\\" else 1
            if is_class:
                is_class = char != "]"
            elif char == "[":
                is_class = True
            elif char in "()":
                level += 1 if char == "(" else -1
                if level == 0:
                    return
        raise PatternError("unbalanced parenthesis")

    def _character(self) -> str:
        char = self._next()
        self.at += 1
        if char == "\\":
            char = self._next()
            self.at += 1
            if char.isalnum():
                if char not in ESCAPES:
                    raise PatternError(f"'\\{char}' at {self.at - 2}")
                char = ESCAPES[char]
        elif char in "*+?[]{}":
            raise PatternError(f"{char!r} at {self.at - 1}")
        self._refuse_repeat()
        return char

    def _refuse_repeat(self) -> None:
        if self._next() in ("*", "+", "?") or re.match(r"\{\d", self._pattern[self.at :]):
            raise PatternError(f"{self._next()!r} at {self.at}")
