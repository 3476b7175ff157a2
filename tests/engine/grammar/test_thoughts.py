"""Thoughts: the budget holds for every budget and mark, with and without a grammar."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from llguidance import LLTokenizer

from engine.grammar.messages import Advance, Allowed, Compile, Open, Try
from engine.grammar.process import GrammarHost
from engine.grammar.thoughts import missing_bytes, token_bytes
from engine.protocol.thoughts import ThoughtLimit, limited_source
from tests.support.grammars import byte_tokenizer

END = 261  # of the byte tokenizer
OPEN, CLOSE = "<think>", "</think>"


def limit(budget: int, **fields: object) -> ThoughtLimit:
    """Return a limit for thoughts between OPEN and CLOSE, which are texts."""
    return msgspec.convert(
        {
            "budget": budget,
            "is_open": True,
            "opening": re.escape(OPEN),
            "opens_first": True,
            "closing": re.escape(CLOSE),
            "marks": {},
            "closing_tokens": list(CLOSE.encode()),
            "end_tokens": [END],
            **fields,
        },
        ThoughtLimit,
    )


class Rig:
    """The host of one grammar, and one answer that a greedy model writes."""

    def __init__(self, thoughts: ThoughtLimit, lark: str = "") -> None:
        ours, self._theirs = socket.socketpair()
        self._host = GrammarHost(ours, byte_tokenizer())
        ours.close()
        self._theirs.close()
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]}) if lark else ""
        compiled = self._host._handle(
            Compile(limited_source(msgspec.json.encode(thoughts).decode(), grammar))
        )
        assert compiled is not None
        assert compiled.problem == "", compiled.problem
        self.allowed = self._send(Open(1, 0))
        self.tokens: list[int] = []

    def _send(self, message: Open | Advance | Try) -> Allowed:
        reply = self._host._handle(message)
        assert isinstance(reply, Allowed)
        assert reply.problem == "", reply.problem
        return reply

    def choices(self) -> list[int]:
        """Return the tokens that may come next."""
        bits = np.unpackbits(np.frombuffer(self.allowed.masks[-1], np.uint8), bitorder="little")
        return [token for token in np.nonzero(bits)[0].tolist() if token <= END]

    def take(self, *tokens: int, rollback: int = 0) -> None:
        del self.tokens[len(self.tokens) - rollback :]
        self.tokens += tokens
        self.allowed = self._send(Advance(1, 0, rollback, list(tokens)))

    def draft(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a draft are allowed."""
        return len(self._send(Try(1, 0, list(tokens))).masks)

    def write(self, script: Sequence[int], most: int = 400) -> str:
        """Write an answer: at each place the token of the script there, if it is allowed."""
        while len(self.tokens) < most:
            place = len(self.tokens)
            wanted = script[place] if place < len(script) else END
            choices = self.choices()
            token = wanted if wanted in choices else choices[0]
            if token == END:
                break
            self.take(token)
        return bytes(self.tokens).decode()


@pytest.mark.parametrize("budget", [0, 1, 16, 200])
@pytest.mark.parametrize("lark", ["", f'start: t /[0-9]+/\nt[suffix="{CLOSE}"]: /(?s:.*)/'])
def test_thoughts_end_at_the_budget_and_the_answer_goes_on(budget: int, lark: str) -> None:
    rig = Rig(limit(budget), lark)
    thought, found, answer = rig.write(b"1" * 300, most=320).partition(CLOSE)
    assert found
    assert thought == "1" * budget
    assert answer == "1" * (300 - budget - len(CLOSE))


def test_thoughts_within_the_budget_end_themselves() -> None:
    text = f"Hm.{CLOSE}Yes. {OPEN}"  # later it is text
    assert Rig(limit(4)).write(text.encode()) == text


def test_end_token_does_not_end_the_answer_within_its_thoughts() -> None:
    rig = Rig(limit(4))
    assert END not in rig.choices()
    rig.take(*f"Hm{CLOSE}".encode())
    assert END in rig.choices()


def test_thoughts_that_the_answer_opens_are_limited() -> None:
    closed = Rig(limit(3, is_open=False))
    assert closed.write(f"\n{OPEN}aaaaaaa".encode()) == f"\n{OPEN}aaa{CLOSE}"
    assert Rig(limit(3, is_open=False)).write(b"aaaaaaa") == "aaaaaaa"


@pytest.mark.parametrize("lark", ["", f'start: t\nt[suffix="{CLOSE}"]: /(?s:.*)/'])
def test_character_begins_only_where_the_budget_lets_it_end(lark: str) -> None:
    rig = Rig(limit(4), lark)
    for first, begun in enumerate(["xéಠ🐟", "xéಠ", "xé", "x", ""]):
        choices = rig.choices()
        possible = [char for char in "xéಠ🐟" if char.encode()[0] in choices]
        assert possible == list(begun), first
        rig.take(ord("x") if first < 4 else ord("<"))


def test_character_is_finished_before_the_closing_mark() -> None:
    rig = Rig(limit(4), f'start: t\nt[suffix="{CLOSE}"]: /(?s:.*)/')
    assert rig.write("🐟🐟".encode()) == f"🐟{CLOSE}"


def test_forced_tokens_are_drafts_that_are_allowed() -> None:
    rig = Rig(limit(2))
    assert rig.allowed.forced == []
    assert rig.draft(b"abc" + CLOSE.encode()) == 2
    rig.take(*b"ab")
    assert bytes(rig.allowed.forced) == CLOSE.encode()
    assert rig.draft(rig.allowed.forced) == len(CLOSE)
    assert rig.choices() == [ord("<")]  # a draft leaves nothing behind


def test_rollback_gives_the_budget_back() -> None:
    rig = Rig(limit(3))
    rig.take(*b"abc<")
    assert rig.choices() == [ord("/")]
    rig.take(*b"B", rollback=3)
    assert len(rig.choices()) > 100
    rig.take(*b"C")
    assert rig.choices() == [ord("<")]


@pytest.mark.parametrize("count", [1, 40, 99])
def test_rollback_over_many_tokens_leads_where_the_answer_was(count: int) -> None:
    rig = Rig(limit(70))
    rig.take(*b"a" * 70, *CLOSE.encode(), *b"b" * 30)
    before = rig.tokens[: len(rig.tokens) - count]
    rig.take(rollback=count)
    fresh = Rig(limit(70))
    fresh.take(*before)
    assert rig.choices() == fresh.choices()
    assert rig.allowed.forced == fresh.allowed.forced


def test_marks_that_are_tokens_count_anywhere_and_not_twice() -> None:
    marks = {"\ufdd0": 1, "\ufdd1": 2}
    rig = Rig(
        limit(
            3,
            is_open=False,
            opening="\ufdd0",
            opens_first=False,
            closing="\ufdd1",
            marks=marks,
            closing_tokens=[2],
            reopening_tokens=[1],
        )
    )
    rig.take(*b"Hi", 1, *b"a", 2, *b"more", 1, *b"bc")  # 3 tokens of thoughts
    assert rig.choices() == [2]
    rig.take(2)
    assert 1 not in rig.choices()
    assert ord("x") in rig.choices()


def test_closing_text_that_has_begun_is_completed_and_not_repeated() -> None:
    assert Rig(limit(5)).write(b"abc</thinkers") == f"abc{CLOSE}rs"
    assert Rig(limit(3)).write(f"abc{CLOSE}x".encode()) == f"abc{CLOSE}x"


def test_text_that_only_looks_like_a_closing_mark_is_a_thought() -> None:
    assert Rig(limit(5)).write(b"a</bcdefghijk") == f"a</bc{CLOSE}"


def test_grammar_comes_before_the_limit() -> None:
    rig = Rig(limit(1), 'start: "abc"')  # it cannot be closed
    assert rig.write(b"abc") == "abc"


def test_missing_bytes_are_those_of_the_last_character(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [b"a", "é".encode(), b"\xc3", b"x\xe2", b"\xe2\x82", b"\xf0\x9f", b"\x82\xac", b""]

    def read(tokenizer: LLTokenizer, tokens: Sequence[int]) -> list[bytes]:
        return [texts[token % len(texts)] for token in tokens]

    monkeypatch.setattr("engine.grammar.thoughts.token_bytes", read)
    monkeypatch.setattr("engine.grammar.thoughts.CHUNK", 5)
    assert missing_bytes(byte_tokenizer())[: len(texts)].tolist() == [0, 0, 1, 2, 1, 2, 0, 0]


def test_token_bytes_are_those_of_each_token() -> None:
    tokenizer: LLTokenizer = byte_tokenizer()
    tokens = range(3, tokenizer.vocab_size)
    expected = [tokenizer.decode_bytes([token]) for token in tokens]
    expected[tokens.index(tokenizer.eos_token)] = b""  # its text does not matter
    assert token_bytes(tokenizer, tokens) == expected
