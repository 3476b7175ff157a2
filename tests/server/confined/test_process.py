"""Limits of a process that runs a checkpoint's own programs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from server.confined.process import ConfinedError, ConfinedProcess, Limits

LIMITS = Limits(memory=256 << 20, seconds=1, first_seconds=1)
CHILD = [
    sys.executable,
    "-c",
    "from server.confined.process import serve; serve(lambda code: eval(code).encode())",
]


@pytest.fixture
def child() -> Iterator[ConfinedProcess]:
    process = ConfinedProcess(CHILD, LIMITS)
    yield process
    process.close()


def test_calls_within_the_limits_are_answered(child: ConfinedProcess) -> None:
    for number in range(3):
        assert child.call(f"str({number})".encode()) == str(number).encode()
    with pytest.raises(ConfinedError, match="status 1"):
        child.call(b"")  # an empty message is a message, which this child cannot evaluate


def test_long_answers_are_complete(child: ConfinedProcess) -> None:
    large = child.call(b"'x' * 5_000_000")
    assert len(large) == 5_000_000


def test_machine_without_memory_ends_the_child_first(child: ConfinedProcess) -> None:
    assert child.call(b"open('/proc/self/oom_score_adj').read()") == b"1000\n"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("'x' * 10**9", "took more than 256 MiB of memory"),
        ("[0] * 10**8 and ''", "took more than 256 MiB of memory"),
        ("str(9**(9**9))", r"took more than 1 s"),  # holds the GIL
        ("__import__('time').sleep(60)", "took more than 1 s"),
        ("1 / 0", "ended its process with status 1"),
        ("__import__('os').abort()", "took more than 256 MiB of memory"),
        ("__import__('os').kill(__import__('os').getpid(), 11)", "status -11"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "status -9"),  # such as by Linux
    ],
)
def test_call_beyond_a_limit_ends_the_process(
    child: ConfinedProcess, code: str, problem: str
) -> None:
    assert child.call(b"'warm'") == b"warm"
    began = time.monotonic()
    with pytest.raises(ConfinedError, match=problem):
        child.call(code.encode())
    assert time.monotonic() - began < 10
    assert not child.is_running
    with pytest.raises(ConfinedError):
        child.call(b"'again'")


def test_process_ends_with_its_parent() -> None:
    """It reads the end of its stdin. A computation is ended by its alarm."""
    source = (
        "import sys, os; from server.confined.process import *\n"
        f"p = ConfinedProcess({CHILD!r}, Limits(256 << 20, 1))\n"
        "print(p.call(b'str(__import__(\"os\").getpid())').decode(), flush=True)\n"
        "p.send(b'9**(9**9)') if len(sys.argv) > 1 else None\n"
        "os.kill(os.getpid(), 9)"
    )
    for arguments in ([], ["busy"]):
        read, write = os.pipe()
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", source, *arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)],
        )
        os.close(write)
        with open(read, encoding="ascii") as answers:
            confined = int(answers.readline())
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        deadline = time.monotonic() + 20
        while _runs(confined):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
