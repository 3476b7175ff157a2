"""One answer in the process of its grammar: llguidance's matcher, and a limit of its thoughts."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher

from engine.grammar.thoughts import Thoughts


class Answer:
    """One answer, as a matcher and a limit of its thoughts follow it. Each may be absent.

    `first` is the matcher before the first token. llguidance has a rollback, but its masks behind
    it allow tokens that the grammar does not (findings/llguidance_rollback.sh). So going back is to
    begin again, at 1 µs for each token.
    """

    def __init__(self, first: LLMatcher | None, thoughts: Thoughts | None = None) -> None:
        self._first = first
        self._tokens: list[int] = []  # that the matcher has
        self.matcher: Any = None if first is None else first.deep_copy()
        self.thoughts = thoughts
        self.problem = ""

    def copy(self) -> Answer:
        """Return an answer at this place, which goes on without changing this one."""
        thoughts = None if self.thoughts is None else self.thoughts.copy()
        copied = Answer(self.matcher, thoughts)
        copied.problem = self.problem
        return copied

    def check(self) -> None:
        if self.matcher is not None and not self.problem and self.matcher.is_error():
            self.problem = self.matcher.get_error() or "unknown error"

    def take(self, tokens: list[int], rollback: int = 0) -> None:
        if self.thoughts is not None:
            self.thoughts.roll_back(rollback)
            for token in tokens:
                self.thoughts.take(token)
        if self.matcher is None:
            return
        if not self.problem and rollback:
            assert self._first is not None
            tokens = [*self._tokens[:-rollback], *tokens]
            self._tokens = []
            self.matcher = self._first.deep_copy()
        for token in tokens:
            self.check()
            if self.problem:
                return
            self.matcher.consume_token(token)
            self._tokens.append(token)
        self.check()

    def mask(self) -> bytes:
        """Return the mask at this place; b"" if the grammar cannot go on."""
        if self.matcher is None:
            assert self.thoughts is not None
            return self.thoughts.mask().tobytes()
        self.check()
        if self.problem:
            return b""
        words = self.matcher.compute_bitmask()
        self.check()
        if self.thoughts is not None:
            words = self.thoughts.narrowed(words)
        return b"" if self.problem else words

    def allows(self, token: int) -> bool:
        """Return whether the token may come next."""
        if self.thoughts is not None and not self.thoughts.allows(token):
            return False
        return self.matcher is None or self.matcher.validate_tokens([token]) == 1

    def steady(self) -> int:
        """Return behind how many tokens the mask still holds, unless one is a mark."""
        if self.matcher is not None or self.thoughts is None:
            return 0
        return self.thoughts.steady

    def forced(self) -> list[int]:
        """Return the next tokens if there is no choice."""
        forced = self.thoughts.forced if self.thoughts is not None else []
        if forced or self.matcher is None:
            return forced
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens
