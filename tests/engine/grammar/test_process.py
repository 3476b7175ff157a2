"""The thread that compiles: other threads of the machine go first."""

from __future__ import annotations

import os
import socket
import threading
import time

from engine.grammar.messages import Compile, Compiled, Open
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
