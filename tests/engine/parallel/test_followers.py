"""Rank 0 sees the end of a follower at once, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from engine.config import EngineConfig
from engine.device.board import Board
from engine.parallel import followers, stall
from engine.parallel.followers import DEAD_STATUS, INTERRUPT, FollowerDiedError, Followers
from tests.support.process import eventually

CONFIG = EngineConfig(tensor_parallel_size=3)
WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]
SEEN_S = 1.0
BUSY = [sys.executable, "-c", "while True: pass"]


@pytest.fixture(autouse=True)
def same_cores() -> Iterator[None]:
    """Rank 0 is bound to a memory node, if the machine has several."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


# The main thread does not take the signal, as if it waited for a GPU.
DEAF = f"""
import signal, time
from engine.config import EngineConfig
from engine.parallel.followers import INTERRUPT, Followers

signal.pthread_sigmask(signal.SIG_BLOCK, [INTERRUPT])
with Followers(EngineConfig(tensor_parallel_size=2), {WAITS!r}) as followers:
    followers._processes[0].kill()
    time.sleep(30)
"""


def children() -> list[psutil.Process]:
    """The followers; other tests may have left other processes."""
    return [child for child in psutil.Process().children() if WAITS[-1] in child.cmdline()]


def killed_while_waiting(killed: list[float]) -> None:
    with Followers(CONFIG, WAITS) as followers:
        killed.append(time.monotonic())
        followers._processes[1].kill()
        time.sleep(10)


def killed_during_a_collective() -> None:
    with Followers(CONFIG, WAITS) as followers:
        followers._is_reported = True  # the signal comes too late
        followers._processes[0].kill()
        raise RuntimeError("Connection reset by peer")


def killed_before_a_message() -> None:
    with Followers(CONFIG, WAITS) as followers:
        followers._is_reported = True  # the signal comes too late
        followers._processes[0].kill()
        raise BrokenPipeError(32, "Broken pipe")


def ended_one_after_the_other(reports: list[FollowerDiedError]) -> None:
    """Rank 2 ends because rank 1 has: only the first end is an error."""
    with Followers(CONFIG, WAITS) as followers:
        try:
            followers._processes[0].kill()
            time.sleep(10)
        except FollowerDiedError as error:
            reports.append(error)
        followers._processes[1].kill()
        followers._processes[1].wait()
        time.sleep(0.1)


def failing() -> None:
    with Followers(CONFIG, WAITS):
        # A child that has not executed its command yet is not found by it.
        eventually(lambda: len(children()) == 2, "both run")
        raise ValueError("own")


def test_death_of_a_follower_interrupts_the_main_thread() -> None:
    handler, killed = signal.getsignal(INTERRUPT), list[float]()
    with pytest.raises(
        FollowerDiedError, match=r"^The process of rank 2 was killed by signal 9\.$"
    ):
        killed_while_waiting(killed)
    assert time.monotonic() - killed[0] < SEEN_S
    assert children() == []
    assert signal.getsignal(INTERRUPT) is handler


def test_failed_collective_is_explained_by_the_death_behind_it() -> None:
    """The connection breaks before the process can be waited for."""
    with pytest.raises(FollowerDiedError, match="rank 1 was killed by signal 9") as caught:
        killed_during_a_collective()
    assert str(caught.value.__cause__) == "Connection reset by peer"


def test_broken_pipe_is_explained_by_the_death_behind_it() -> None:
    with pytest.raises(FollowerDiedError, match="rank 1 was killed by signal 9") as caught:
        killed_before_a_message()
    assert isinstance(caught.value.__cause__, BrokenPipeError)


def test_follower_that_ends_after_another_is_not_reported() -> None:
    reports: list[FollowerDiedError] = []
    ended_one_after_the_other(reports)
    assert [str(report) for report in reports] == ["The process of rank 1 was killed by signal 9."]


@pytest.mark.parametrize("status", [0, 5])
def test_follower_that_exits_is_reported_with_its_status(status: int) -> None:
    exits = [sys.executable, "-c", f"import sys; sys.exit({status})"]
    text = f"The process of rank 1 exited with status {status}."
    config = EngineConfig(tensor_parallel_size=2)
    with pytest.raises(FollowerDiedError, match=text), Followers(config, exits):
        time.sleep(10)


def test_error_of_rank_0_stays_and_ends_the_followers() -> None:
    with pytest.raises(ValueError, match="own"):
        failing()
    assert children() == []


def test_follower_that_does_not_end_by_itself_is_killed() -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Followers(EngineConfig(tensor_parallel_size=2), hangs) as followers:
        [process] = followers._processes
    assert process.returncode == -signal.SIGKILL


def stopped_in_a_step() -> None:
    with Followers(EngineConfig(tensor_parallel_size=2), WAITS) as followers:
        eventually(lambda: len(children()) == 1, "it runs")
        os.kill(followers._processes[0].pid, signal.SIGSTOP)
        followers.board.compute()
        with followers.board.waiting():
            time.sleep(20)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and take a second of silence for a stall."""
    monkeypatch.setattr(stall, "TICK_S", 0.1)
    monkeypatch.setattr(stall, "STALL_S", 1.0)
    monkeypatch.setattr(stall, "STOPPED_S", 1.0)


@pytest.mark.usefixtures("quick")
def test_follower_that_is_stopped_in_a_step_ends_the_engine() -> None:
    began = time.monotonic()
    text = (
        r"^The processes of the model have stalled for 1(\.\d)? s: rank 1 is stopped by a signal\.$"
    )
    with pytest.raises(FollowerDiedError, match=text):
        stopped_in_a_step()
    assert time.monotonic() - began < 1.0 + 2 * SEEN_S
    assert children() == []


@pytest.mark.usefixtures("quick")
def test_stopped_follower_is_left_alone_while_no_step_is_computed() -> None:
    with Followers(EngineConfig(tensor_parallel_size=2), WAITS) as followers:
        os.kill(followers._processes[0].pid, signal.SIGSTOP)
        followers.board.compute()
        followers.board.rest()
        time.sleep(1.5)
        assert followers._processes[0].poll() is None


@pytest.mark.usefixtures("quick")
def test_follower_that_computes_for_long_is_waited_for() -> None:
    """It may compile a kernel, or read a long prompt, while rank 0 waits in a sum."""
    with Followers(EngineConfig(tensor_parallel_size=2), BUSY) as followers:
        board = Board(1, 2, followers._path(followers._notes))
        board.compute()
        followers.board.compute()
        with followers.board.waiting():
            time.sleep(2.5)
            assert followers._processes[0].poll() is None


def all_wait() -> None:
    with Followers(EngineConfig(tensor_parallel_size=2), BUSY) as followers:
        board = Board(1, 2, followers._path(followers._notes))
        board.wait()
        followers.board.wait()
        time.sleep(10)


@pytest.mark.usefixtures("quick")
def test_busy_follower_that_waits_for_others_does_not_move() -> None:
    """A wait for a GPU, or for a sum, may use a core."""
    with pytest.raises(FollowerDiedError, match="they wait for each other, or for a GPU"):
        all_wait()


def test_each_rank_has_the_cores_of_its_memory_node(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    first, last = {cores[0]}, {cores[-1]}
    monkeypatch.setattr(followers, "cores_of_ranks", lambda size: [first, last, last])
    with Followers(CONFIG, WAITS) as started:
        pids = [process.pid for process in started._processes]
        assert [os.sched_getaffinity(pid) for pid in (0, *pids)] == [first, last, last]


def test_followers_leave_no_open_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Followers(CONFIG, WAITS):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_followers_end_with_the_engine_in_silence() -> None:
    with Followers(CONFIG, WAITS):
        pass
    time.sleep(0.05)  # a thread that takes it for a death would interrupt
    assert children() == []


def test_death_of_a_follower_ends_a_process_whose_main_thread_waits_for_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=20)
    assert done.returncode == DEAD_STATUS
    assert done.stderr == "penstock: The process of rank 1 was killed by signal 9.\n"
