"""The processes of grammars, with faults that the title of a schema names."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import llguidance

from engine.grammar import process

KEPT: list[bytes] = []


class FaultyMatcher:
    """An LLMatcher with the fault that its schema's title names."""

    def __init__(self, tokenizer: Any, source: str, *, log_level: int = 0) -> None:
        self._matcher = llguidance.LLMatcher(tokenizer, source, log_level=log_level)
        found = re.search(r'"title": ?"(\w+)"', source)
        self._fault = found[1] if found else ""
        self._num_tokens = 0
        if self._fault == "panics":
            raise BaseException("index out of bounds")  # as pyo3 raises a Rust panic
        if self._fault == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._fault == "dozes":
            time.sleep(0.3)

    def deep_copy(self) -> FaultyMatcher:
        copy = FaultyMatcher.__new__(FaultyMatcher)
        copy._matcher = self._matcher.deep_copy()
        copy._fault, copy._num_tokens = self._fault, self._num_tokens
        return copy

    def consume_token(self, token: int) -> bool:
        self._num_tokens += 1
        return self._matcher.consume_token(token)

    def compute_bitmask(self) -> bytes:
        if self._fault in ("sleeps", "dozes") and self._num_tokens:
            time.sleep(0.3)
        if self._num_tokens >= 6:
            self._fail()
        return self._matcher.compute_bitmask()

    def _fail(self) -> None:
        if self._fault == "breaks":
            self._matcher.consume_token(0)  # not allowed here: the matcher reports an error
        while self._fault == "spins":
            pass
        if self._fault == "grows":
            KEPT.append(b"x" * (80 << 20))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


if __name__ == "__main__":
    process.LLMatcher = FaultyMatcher  # type: ignore[misc, assignment]
    process.main()
