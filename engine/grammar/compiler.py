"""Compile grammars with llguidance (github.com/guidance-ai/llguidance), on a thread of its own.

A grammar comes from a client and may take seconds to compile; llguidance's limits bound them. The
thread has the lowest priority, and llguidance releases the GIL, so that running streams go on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import RequestRejectedError
from engine.protocol import Grammar

if TYPE_CHECKING:  # imported on the thread: most servers never need it
    from llguidance import LLMatcher, LLTokenizer

DEADLINE_S = 20.0  # for a grammar's turn to begin
CACHED_GRAMMARS, CACHED_BYTES = 512, 8 << 20  # limits of the cache; the bytes are of the sources
# llguidance recurses from rule to rule, and an overflow of the stack ends the process. A rule takes
# at least 8 bytes of a source and 4 KB of the stack; an object of a JSON schema 60 bytes and 9 KB.
MAX_SOURCE_BYTES = 512 << 10
STACK_BYTES = 512 << 20  # reserved; only what is used takes memory
LOWEST_PRIORITY = 19  # a nice value

TOO_LATE = "The grammars of other requests took too long to compile; retry later."
UNUSABLE = "The answer cannot be held to this grammar"

Compilation = Future["LLMatcher"]


class GrammarCompiler:
    """Compiles grammars for the tokenizer in `folder` and a model with `vocab_size` logits."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._thread = _deep_thread()
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._cache: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._cached_bytes = 0

    def submit(self, grammar: Grammar) -> Compilation:
        """Start compiling. The result is a new matcher, at the start of an answer.

        The result raises RequestRejectedError if llguidance cannot follow the grammar or read the
        tokenizer, or if others take too long.
        """
        return self._thread.submit(self._compile, grammar, time.monotonic() + DEADLINE_S)

    def _compile(self, grammar: Grammar, deadline: float) -> LLMatcher:
        if time.monotonic() > deadline:
            raise RequestRejectedError("server_overloaded", TOO_LATE, grammar.param)
        try:
            matcher = self._cache.pop(grammar, None) or self._compiled(grammar)
        except RequestRejectedError:
            raise
        except BaseException as error:  # a Rust panic is no Exception
            raise _refusal(grammar, f"llguidance failed: {error}") from error
        self._cache[grammar] = matcher
        self._trim()
        return matcher.deep_copy()

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if len(grammar.source) > MAX_SOURCE_BYTES:
            limit = f"it has {len(grammar.source)} bytes, and the limit is {MAX_SOURCE_BYTES}"
            raise _refusal(grammar, limit)
        matcher = LLMatcher(self._tokenizer(grammar), grammar.source, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what is too large only for the first token
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        self._cached_bytes += len(grammar.source)
        return matcher

    def _tokenizer(self, grammar: Grammar) -> LLTokenizer:
        from llguidance import LLTokenizer

        ends = grammar.end_token_ids
        if ends not in self._tokenizers:
            text = self._file.read_text(encoding="utf-8")
            made = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(ends))
            self._tokenizers[ends] = made
        return self._tokenizers[ends]

    def _trim(self) -> None:
        while len(self._cache) > CACHED_GRAMMARS or self._cached_bytes > CACHED_BYTES:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest.source)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _refusal(grammar: Grammar, why: str) -> RequestRejectedError:
    """Return the error for llguidance's message, whose other lines draw the place or a state."""
    lines = [line.strip() for line in why.strip().splitlines()] or ["no reason given"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = " ".join([lines[0], *causes])[:500].rstrip(".")
    return RequestRejectedError("invalid_grammar", f"{UNUSABLE}: {text}.", grammar.param)


def _deep_thread() -> ThreadPoolExecutor:
    """Return a thread of the lowest priority with a large stack."""
    executor = ThreadPoolExecutor(1, "grammar")
    usual = threading.stack_size(STACK_BYTES)  # of the threads that start from here on
    try:
        executor.submit(_lower_priority).result()
    finally:
        threading.stack_size(usual)
    return executor


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # Linux has priorities per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
