"""A drafter of tokens that have followed the last few before, in all prompts and answers so far."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from engine.scheduling.sequence import Sequence as Record
from engine.scheduling.speculation import Drafter

LENGTH = 4  # tokens that a follower is looked up by
SLOTS = 1 << 20  # each is overwritten by the latest n-gram that falls into it
MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd
WORD = (1 << 64) - 1
SLOT_SHIFT = 64 - SLOTS.bit_length() + 1
UNKNOWN = -1


class NgramPool:
    """A hash table of fixed size, shared by all requests. A lookup takes the same time at any size.

    `root` keeps apart what must not share: only n-grams added with the same root are found.
    """

    def __init__(self) -> None:
        self._followers = np.full(SLOTS, UNKNOWN, np.int32)
        self._tags = np.zeros(SLOTS, np.uint32)  # the low bits of each n-gram's hash

    def add(self, tokens: Sequence[int], first: int, root: int) -> None:
        """Add the tokens from `first` on, each as the follower of those before it."""
        first = max(first, LENGTH)
        if first >= len(tokens):
            return
        known = np.array(tokens[first - LENGTH :], np.uint64)
        count = len(tokens) - first
        hashes = np.full(count, root & WORD, np.uint64)
        for place in range(LENGTH):
            hashes = (hashes ^ known[place : place + count]) * np.uint64(MULTIPLIER)
        slots = hashes >> np.uint64(SLOT_SHIFT)
        self._followers[slots] = known[LENGTH:].astype(np.int32)
        self._tags[slots] = hashes.astype(np.uint32)

    def continuation(self, tokens: Sequence[int], most: int, root: int) -> list[int]:
        """Return up to `most` tokens that have followed `tokens`, one after the other."""
        if len(tokens) < LENGTH:
            return []
        recent = list(tokens[-LENGTH:])
        while len(recent) < LENGTH + most:
            token = self._follower(recent[-LENGTH:], root)
            if token == UNKNOWN:
                break
            recent.append(token)
        return recent[LENGTH:]

    def _follower(self, tokens: Sequence[int], root: int) -> int:
        found = root & WORD
        for token in tokens:
            found = (found ^ token) * MULTIPLIER & WORD
        slot = found >> SLOT_SHIFT
        if self._tags[slot] != found & 0xFFFFFFFF:
            return UNKNOWN
        return int(self._followers[slot])


def ngram_drafter() -> Drafter:
    """Return a drafter that copies what has followed the last tokens before, in any request."""
    pool, key = NgramPool(), os.urandom(16)

    def draft(sequence: Record, most: int) -> Sequence[int]:
        root = hash((key, sequence.salt))
        pool.add(sequence.tokens, sequence.drafts.num_added, root)
        sequence.drafts.num_added = len(sequence.tokens)
        return pool.continuation(sequence.tokens, most, root)

    return draft
