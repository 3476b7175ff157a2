"""A stopped forker or process of a grammar is ended, and requests are refused in time."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from engine.grammar import compiler as compiling
from engine.grammar import limits
from engine.grammar.compiler import GrammarCompiler, GrammarProcess
from engine.grammar.connection import ForkerProcess
from engine.grammar.messages import Advance
from tests.engine.grammar.test_compiler import (
    SCHEMA,
    compiler_for,
    grammar,
    opened,
    process_of,
)
from tests.support.reference_data import LLAMA, located


def forker_of(compiler: GrammarCompiler) -> subprocess.Popen[bytes]:
    assert compiler._forker is not None
    return compiler._forker._process


def wait_for_refusal(compiler: GrammarCompiler, process: GrammarProcess) -> str:
    """Return the code of the refusal. The test fails if there is none within a minute."""
    end = time.monotonic() + 60
    while process.refusal is None and time.monotonic() < end:
        compiler.poll(0.1)
    assert process.refusal is not None
    return process.refusal.code


@pytest.mark.parametrize("is_first", [True, False], ids=["at its start", "later"])
def test_stopped_forker_refuses_at_the_limit_of_a_call_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    monkeypatch.setattr(limits, "CALL_S", 3.0)
    compiler, _ = compiler_for(located(LLAMA))
    if is_first:
        process = process_of(compiler, "a", 0)
    else:
        assert opened(compiler, grammar(2, json_schema=SCHEMA)).refusal is None
    stopped = forker_of(compiler)
    stopped.send_signal(signal.SIGSTOP)
    if not is_first:
        process = process_of(compiler, "a", 0)
    queued = process_of(compiler, "a", 1)
    other = process_of(compiler, "bb", 0)
    began = time.monotonic()
    assert wait_for_refusal(compiler, process) == "server_overloaded"
    assert time.monotonic() - began < 3.0 + limits.END_S + 5
    assert wait_for_refusal(compiler, other) == "server_overloaded"
    while not queued.is_compiled:
        assert queued.refusal is None
        compiler.poll(0.1)
    assert stopped.poll() == -signal.SIGKILL
    assert forker_of(compiler) is not stopped
    assert opened(compiler, grammar(2, json_schema=SCHEMA), 7).refusal is None
    compiler.close()


def test_stopped_forker_that_reports_no_end_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if every grammar is compiled, and only an idle one is to end."""
    monkeypatch.setattr(compiling, "IDLE_PROCESSES", 0)
    compiler, _ = compiler_for(located(LLAMA))
    answer = opened(compiler, grammar(2, json_schema=SCHEMA))
    stopped = forker_of(compiler)
    stopped.send_signal(signal.SIGSTOP)
    compiler.close_answer(answer.process, 1)
    end = time.monotonic() + 60
    while stopped.poll() is None and time.monotonic() < end:
        compiler.poll(0.1)
    assert stopped.poll() == -signal.SIGKILL
    assert opened(compiler, grammar(2, json_schema=SCHEMA), 2).refusal is None
    compiler.close()


def test_stopped_process_is_refused_and_the_forker_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, _ = compiler_for(located(LLAMA))
    answer = opened(compiler, grammar(2, json_schema=SCHEMA))
    forker = forker_of(compiler)
    (child,) = Path(f"/proc/{forker.pid}/task/{forker.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGSTOP)
    monkeypatch.setattr(limits, "CALL_S", 1.0)
    answer.process.send(Advance(1, 1, 0, [5]))
    assert wait_for_refusal(compiler, answer.process) == "invalid_grammar"
    while compiler._processes:
        compiler.poll(0.1)
    assert forker_of(compiler) is forker
    assert forker.poll() is None
    compiler.close()


def test_forker_that_works_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may read a large tokenizer for longer than a call may take."""
    monkeypatch.setattr(limits, "CALL_S", 0.2)
    monkeypatch.setattr(limits, "END_S", 0.2)
    ticks = itertools.count(1)
    monkeypatch.setattr(ForkerProcess, "cpu_ticks", property(lambda self: next(ticks)))
    compiler, _ = compiler_for(located(LLAMA))
    process = process_of(compiler, "a", 0)
    forker = forker_of(compiler)
    forker.send_signal(signal.SIGSTOP)
    assert wait_for_refusal(compiler, process) == "server_overloaded"
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        compiler.poll(0.05)
    assert forker_of(compiler) is forker
    forker.send_signal(signal.SIGCONT)
    while compiler._processes:
        compiler.poll(0.1)
    monkeypatch.undo()
    assert opened(compiler, grammar(2, json_schema=SCHEMA)).refusal is None
    compiler.close()
