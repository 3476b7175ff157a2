"""The thread that compiles: other threads of the machine go first."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from llguidance import LLTokenizer

from engine.grammar.messages import Advance, Allowed, Compile, Compiled, Open, Try
from engine.grammar.process import NICEST, GrammarHost, on_deep_thread


def priority() -> str:
    """Return the scheduler's policy and the nice value of this thread."""
    return (
        f"{os.sched_getscheduler(0)} {os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}"
    )


def test_quick_grammar_is_compiled_at_a_low_priority_that_still_gets_turns() -> None:
    assert on_deep_thread(lambda source: source + priority(), "") == f"{os.SCHED_OTHER} {NICEST}"


def test_slow_grammar_is_compiled_when_no_other_thread_wants_to_run() -> None:
    before = priority()

    def work(source: str) -> str:
        end = time.process_time() + 5
        while time.process_time() < end and os.sched_getscheduler(0) != os.SCHED_IDLE:
            pass
        return str(os.sched_getscheduler(0))

    assert on_deep_thread(work, "") == str(os.SCHED_IDLE)
    assert priority() == before


def test_answer_that_is_opened_after_a_refusal_does_not_end_the_process() -> None:
    """The engine sends both messages at once, and would report the end in place of the refusal."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = GrammarHost(ours, "this model has no tokenizer")
        refused = host._handle(Compile("{}"))
        assert isinstance(refused, Compiled)
        assert "no tokenizer" in refused.problem
        assert host._handle(Open(1, 1)) is None


ROLLED_BACK = r"""
start: r0 T0
r0: T0 "</p>"~1..3 r1~1..3 | T1~2 [r1] | "\n"~1..3
r1: "}]"~2 T1 T0 | T0 T1~2 T1~1..3
T0: "\n"
T1: /./
"""
DEMO = Path(__file__).parents[3] / "engine" / "demo" / "model" / "tokenizer.json"


@pytest.fixture
def host_of() -> Iterator[Callable[[str], GrammarHost]]:
    """A function that returns a host with a compiled grammar and with answer 1."""
    sockets = socket.socketpair()
    tokenizer = LLTokenizer(DEMO.read_text(encoding="utf-8"))

    def host(grammar: str) -> GrammarHost:
        made = GrammarHost(sockets[0], tokenizer)
        source = json.dumps({"grammars": [{"lark_grammar": grammar}]})
        assert made._handle(Compile(source)) is not None
        made._handle(Open(1, 0))
        return made

    yield host
    for each in sockets:
        each.close()


@pytest.mark.parametrize("goes_back", ["draft", "rollback"])
def test_masks_after_going_back_are_those_of_the_grammar(
    host_of: Callable[[str], GrammarHost], goes_back: str
) -> None:
    """llguidance's own rollback leaves a mask that allows a token of two braces here."""
    encode = tokenizers.Tokenizer.from_file(str(DEMO)).token_to_id
    first, brace, bracket, newline, less = map(encode, ("</", "}", "]", "\u010a", "<"))
    straight, turned = host_of(ROLLED_BACK), host_of(ROLLED_BACK)
    expected = straight._handle(Advance(1, 1, 0, [first, brace, bracket, brace, bracket], False))
    turned._handle(Advance(1, 1, 0, [first], False))
    if goes_back == "draft":
        turned._handle(Try(1, 2, [newline, less]))
        found = turned._handle(Advance(1, 3, 0, [brace, bracket, brace, bracket], False))
    else:
        turned._handle(Advance(1, 2, 0, [newline, less], True))
        found = turned._handle(Advance(1, 3, 2, [brace, bracket, brace, bracket], False))
    assert isinstance(found, Allowed)
    assert isinstance(expected, Allowed)
    assert found.masks == expected.masks
    assert found.problem == ""
