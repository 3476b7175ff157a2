"""Thoughts: follows how much an answer thinks, and ends its thoughts when the budget is spent.

The process of a grammar has one for each answer. Its masks come on top of the grammar's.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from engine.protocol.thoughts import ThoughtLimit

WORD_BITS = 32
MOST_TEXT = 1024  # characters that an expression may match
LONGEST_CHARACTER = 4  # bytes of UTF-8
CONTINUATION = range(0x80, 0xC0)
MOST_STEADY = 1024  # tokens that a process learns at once: reading them takes 4 ms
CHUNK = 4096  # tokens whose bytes are in memory at once
SPACING = 32  # tokens between the places of an answer that are kept, for a way back
Words = npt.NDArray[np.uint32]


class TokenTexts:
    """The tokens of a vocabulary as text, and the masks that thoughts need."""

    def __init__(self, tokenizer: LLTokenizer, limit: ThoughtLimit) -> None:
        self._tokenizer = tokenizer
        self._marks = {token: mark for mark, token in limit.marks.items()}
        self._num_words = -(-tokenizer.vocab_size // WORD_BITS)
        self.every = self.without(())
        self.unended = self.without(limit.end_tokens)
        self.unopened = self.without(limit.reopening_tokens)
        missing = missing_bytes(tokenizer)
        # By the tokens of thoughts that may follow: the tokens whose last character they can end.
        self.endable = [
            self.without(np.nonzero(missing > left)[0].tolist(), self.unended)
            for left in range(LONGEST_CHARACTER - 1)
        ]

    def text(self, token: int) -> str:
        mark = self._marks.get(token)
        if mark is not None:
            return mark
        if self._tokenizer.is_special_token(token):
            return ""
        return self._tokenizer.decode_bytes([token]).decode("latin-1")

    def only(self, token: int) -> Words:
        """Return the mask that allows one token."""
        words = np.zeros(self._num_words, np.uint32)
        words[token // WORD_BITS] = 1 << token % WORD_BITS
        return words

    def without(self, tokens: Sequence[int], others: Words | None = None) -> Words:
        """Return the mask that allows all tokens, or all of `others`, except `tokens`."""
        words = np.full(self._num_words, 0xFFFFFFFF, np.uint32) if others is None else others.copy()
        for token in tokens:
            words[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        return words


def missing_bytes(tokenizer: LLTokenizer) -> npt.NDArray[np.int8]:
    """Return how many bytes of UTF-8 the last character of each token lacks.

    0 for tokens that only continue a character: they bring its end nearer.
    """
    missing = np.zeros(tokenizer.vocab_size, np.int8)
    for first in range(0, tokenizer.vocab_size, CHUNK):
        tokens = range(first, min(first + CHUNK, tokenizer.vocab_size))
        for token, text in zip(tokens, token_bytes(tokenizer, tokens), strict=True):
            if text and text[-1] >= 0x80:
                missing[token] = _missing(text)
    return missing


def token_bytes(tokenizer: LLTokenizer, tokens: Sequence[int]) -> list[bytes]:
    """Return the bytes of each token, by one call instead of one for each.

    An end token separates them, because no other token has its text. Its own are left out.
    """
    end = tokenizer.eos_token
    between = tokenizer.decode_bytes([end])
    interleaved = [each for token in tokens if token != end for each in (token, end)]
    parts = tokenizer.decode_bytes(interleaved).split(between)[:-1]
    if len(parts) * 2 != len(interleaved):
        return [tokenizer.decode_bytes([token]) for token in tokens]
    if end in tokens:
        parts.insert(tokens.index(end), b"")
    return parts


def _missing(text: bytes) -> int:
    for count, byte in enumerate(reversed(text[-LONGEST_CHARACTER:]), 1):
        if byte not in CONTINUATION:
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return max(length - count, 0)
    return 0


class Place(NamedTuple):
    """How far an answer is."""

    is_open: bool  # it thinks
    text: str  # that an expression may match: since the last mark
    num_used: int = 0  # tokens of thoughts
    num_closing: int = 0  # of the closing tokens, which the last tokens are
    last: int = -1  # token
    has_thought: bool = False  # it has ended thoughts, perhaps empty ones


class Thoughts:
    """The thoughts of one answer. `take` and `roll_back` follow its tokens."""

    def __init__(self, limit: ThoughtLimit, texts: TokenTexts) -> None:
        self._limit = limit
        self._texts = texts
        self._opening = re.compile(limit.opening, re.DOTALL)
        self._closing = re.compile(limit.closing, re.DOTALL)
        self._place = Place(limit.is_open, limit.before)
        self._tokens = array("I")
        self._saved = [self._place]  # before each token whose index is a multiple of SPACING

    def copy(self) -> Thoughts:
        """Return thoughts at this place, which go on without changing these."""
        copied = Thoughts(self._limit, self._texts)
        copied._place = self._place
        copied._saved = [self._place]
        return copied

    def take(self, token: int) -> None:
        self._place = self._next(self._place, token)
        self._tokens.append(token)
        if len(self._tokens) % SPACING == 0:
            self._saved.append(self._place)

    def roll_back(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if not count:
            return
        del self._tokens[len(self._tokens) - count :]
        last = len(self._tokens) // SPACING
        del self._saved[last + 1 :]
        self._place = self._saved[last]
        for token in self._tokens[last * SPACING :]:
            self._place = self._next(self._place, token)

    def _next(self, place: Place, token: int) -> Place:
        """Return the place behind a token."""
        text = place.text + self._texts.text(token)
        follow = self._thought if place.is_open else self._content
        has_thought = place.has_thought or place.is_open
        return follow(place, token, text)._replace(last=token, has_thought=has_thought)

    def _thought(self, place: Place, token: int, text: str) -> Place:
        """Return the place behind a token within thoughts, or behind their end."""
        closing = self._limit.closing_tokens
        num_used, num_closing = place.num_used, place.num_closing
        if token == closing[num_closing]:
            num_closing += 1
        else:  # what looked like the closing mark was a thought
            num_used += num_closing
            num_closing = int(token == closing[0])
            num_used += not num_closing
        closed = self._closing.search(text)
        if closed is not None:
            if not self._forced(place):
                num_used, num_closing = place.num_used, 0
            rest = text[closed.end() :]
            return Place(False, rest, num_used, num_closing)
        if num_closing == len(closing):  # it does not read as an end, and must not be repeated
            return Place(False, "", num_used)
        return Place(True, text[-MOST_TEXT:], num_used, num_closing)

    def _content(self, place: Place, token: int, text: str) -> Place:
        """Return the place behind a token of the content, or behind the mark of thoughts."""
        num_closing = 0
        if [token] == list(self._forced(place)[:1]):
            num_closing = place.num_closing + 1
        opened = self._opening.search(text)
        is_first = self._limit.opens_first
        if opened is not None and not (is_first and text[: opened.start()].strip()):
            return Place(True, text[opened.end() :], place.num_used)
        text = text[:MOST_TEXT] if is_first else text[-MOST_TEXT:]
        return Place(False, text, place.num_used, num_closing)

    def _forced(self, place: Place) -> Sequence[int]:
        """Return the closing tokens that must come next."""
        is_spent = place.num_used + place.num_closing >= self._limit.budget
        is_due = is_spent if place.is_open else place.num_closing > 0
        return self._limit.closing_tokens[place.num_closing :] if is_due else ()

    @property
    def forced(self) -> list[int]:
        """The closing tokens that must come next."""
        return list(self._forced(self._place))

    def mask(self) -> Words:
        """Return the mask of the next token."""
        place, limit = self._place, self._limit
        forced = self._forced(place)
        if forced:
            return self._texts.only(forced[0])
        left = limit.budget - place.num_used - place.num_closing
        if place.is_open:
            endable = self._texts.endable
            return endable[left - 1] if left <= len(endable) else self._texts.unended
        is_place = limit.reopens_after in (-1, place.last)
        if left <= 0 and is_place and place.has_thought:
            return self._texts.unopened
        return self._texts.every

    @property
    def steady(self) -> int:
        """Behind how many further tokens the mask still holds, unless one is a mark."""
        place, limit = self._place, self._limit
        near = place.text[len(place.text) - min(limit.reach, len(place.text)) :]
        if limit.reach < 0 or any(mark in near for mark in limit.marks) or self._forced(place):
            return 0
        left = limit.budget - place.num_used - place.num_closing
        if place.is_open:
            return max(0, min(left - len(self._texts.endable) - 1, MOST_STEADY))
        return 0 if place.last == limit.reopens_after else MOST_STEADY

    def narrowed(self, allowed: bytes) -> bytes:
        """Return a grammar's mask without the tokens that the limit bans.

        The grammar comes first: if nothing would be left, its mask is returned.
        """
        words = np.frombuffer(allowed, np.uint32) & self.mask()
        return words.tobytes() if words.any() else allowed

    def allows(self, token: int) -> bool:
        """Return whether the token may come next."""
        return bool(self.mask()[token // WORD_BITS] >> token % WORD_BITS & 1)
