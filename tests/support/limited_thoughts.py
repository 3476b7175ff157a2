"""A model that thinks for ever, and whose engine keeps to the limit of its thoughts.

The script of a FakeEngine knows no masks. This one follows the grammar of the request with the host
that follows it in the engine.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from engine.grammar.messages import Advance, Allowed, Compile, Compiled, Open
from engine.grammar.process import GrammarHost
from engine.protocol.generate import GenerateRequest
from tests.support.fake_engine import Script


def thinking(file: Path, thoughts: Sequence[int], answer: Sequence[int], end: int) -> Script:
    """Return a script: the tokens `thoughts`, until they are closed, and then the answer.

    `file` is the tokenizer's. The answer begins at once if the thoughts are not held back.
    """
    source = file.read_text(encoding="utf-8")

    def script(request: GenerateRequest) -> list[int]:
        most = request.params.max_tokens
        if request.grammar is None:
            return [*thoughts, *answer, end][:most]
        tokenizer = LLTokenizer(source, eos_token=[end])
        return _written(tokenizer, request.grammar.source, thoughts, [*answer, end], most)

    return script


def _written(
    tokenizer: LLTokenizer, source: str, thoughts: Sequence[int], answer: Sequence[int], most: int
) -> list[int]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = GrammarHost(ours, tokenizer)
        compiled = host._handle(Compile(source))
        assert isinstance(compiled, Compiled)
        assert not compiled.problem, compiled.problem
        allowed = host._handle(Open(1, 0))
        tokens: list[int] = []
        wanted, is_closed = list(thoughts), False
        closing: list[int] = []
        while len(tokens) < most and (wanted or closing):
            assert isinstance(allowed, Allowed)
            assert not allowed.problem, allowed.problem
            is_held = bool(allowed.forced) and allowed.forced[0] != wanted[0]
            if is_held and not is_closed:
                closing, wanted, is_closed = allowed.forced, list(answer), True
            if closing:
                token, *closing = closing
            else:
                token = allowed.forced[0] if is_held else wanted.pop(0)
            assert is_allowed(allowed, token), (token, tokens)
            if not wanted and not is_closed:
                wanted, is_closed = list(answer), True
            tokens.append(token)
            allowed = host._handle(Advance(1, 0, 0, [token]))
    return tokens


def is_allowed(allowed: Allowed, token: int) -> bool:
    return bool(np.frombuffer(allowed.masks[-1], np.uint32)[token // 32] >> token % 32 & 1)
