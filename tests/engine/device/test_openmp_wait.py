"""WaitPolicy: when a CPU engine's threads spin and when they sleep, and its effect on OpenMP."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engine.device import openmp_wait as openmp_wait
from engine.device.openmp_wait import (
    CALM,
    CHOICES,
    FIRST_PAUSE,
    TRIAL,
    OpenMPWait,
    Times,
    contention,
    idle_threads,
)

CPU = torch.device("cpu")
MS = 10**6  # ns


class Machine:
    """A machine with two computing threads, one of them queueing for a core.

    The share of its time that it queues is `awake` while the threads spin, and `asleep` while they
    sleep.
    """

    def __init__(self, awake: float = 0.0, asleep: float = 0.0) -> None:
        self.awake, self.asleep = awake, asleep
        self.now, self.sleeps, self.slept = 0.0, False, 0
        self.times: dict[str, tuple[float, float]] = {"main": (0, 0), "worker": (0, 0)}
        self.policy = OpenMPWait(self.read, self.sleep)

    def read(self) -> Times:
        return {thread: (int(ran), int(queued)) for thread, (ran, queued) in self.times.items()}

    def sleep(self) -> Callable[[], None]:
        assert not self.sleeps
        self.sleeps, self.slept = True, self.slept + 1
        return self.wake

    def wake(self) -> None:
        self.sleeps = False

    def run(self, seconds: float, step: float = 0.05) -> list[float]:
        """Run for `seconds`; return the times at which the threads were put to sleep."""
        moments: list[float] = []
        end = self.now + seconds
        while self.now < end:
            before = self.slept
            self.policy.poll(self.now)
            if self.slept > before:
                moments.append(self.now)
            share = self.asleep if self.sleeps else self.awake
            self._spend("main", step * 1e9, 0.0)
            self._spend("worker", step * 1e9, share)
            self.now += step
        return moments

    def _spend(self, thread: str, time: float, share: float) -> None:
        ran, queued = self.times[thread]
        self.times[thread] = ran + time * (1 - share), queued + time * share


def test_wait_policy_without_contention_keeps_spinning(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(awake=0.32)
    assert machine.run(30) == []
    assert machine.policy.contention == pytest.approx(0.32)
    assert not caplog.records


def test_wait_policy_contention_sleeps_until_cores_are_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(awake=0.47, asleep=0.3)
    assert machine.run(1.5)[0] <= 0.6
    assert machine.sleeps
    assert machine.policy.contended
    assert machine.policy.contention == pytest.approx(0.3)
    machine.asleep = machine.awake = 0.0
    machine.run(1.1)
    assert not machine.sleeps, "no thread queues: they must wake without a trial"
    assert machine.policy.contended, "contention must not count as over so soon"
    assert machine.run(31) == []
    assert not machine.policy.contended
    (warning, calm) = caplog.records
    assert (warning.levelno, calm.levelno) == (logging.WARNING, logging.INFO)
    assert "queue for a core 47 % of their time" in warning.message
    assert machine.run(30) == []
    assert len(caplog.records) == 2


@pytest.mark.parametrize("asleep", [0.3, 0.03])
def test_wait_policy_lasting_contention_doubles_pause_between_trials(
    asleep: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The share of sleeping threads does not predict that of spinning ones.

    Sleeping threads may queue although spinning would be fine. With spare cores, they may hardly
    queue although spinning would be slow.
    """
    machine = Machine(awake=0.47, asleep=asleep)
    moments = machine.run(150)
    pauses = [b - a for a, b in itertools.pairwise(moments)]
    assert pauses == pytest.approx([pauses[0], 4, 8, 16, 32, 32, 32], abs=1)
    assert 0.5 < pauses[0] < 3
    assert len(caplog.records) == 1, "a trial was logged"
    machine.awake = 0.2
    machine.run(33)
    assert not machine.sleeps
    machine.run(CALM)
    machine.awake = 0.47
    assert len(machine.run(4)) == 2, "after a calm period, pauses must start short again"


@pytest.mark.parametrize("period", [3.0, 10.0])
def test_wait_policy_recurring_contention_logs_once(
    period: float, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(asleep=0.3)
    for _ in range(int(600 / period)):
        machine.awake = 0.47
        machine.run(0.3 * period)
        machine.awake = 0.3
        machine.run(0.7 * period)
    assert len(caplog.records) == 1


def test_wait_policy_failed_trial_is_short() -> None:
    machine = Machine(awake=0.47, asleep=0.3)
    (first,) = machine.run(2)
    (second,) = machine.run(2, step=0.01)
    assert second - first == pytest.approx(FIRST_PAUSE + TRIAL, abs=0.1)


def test_wait_policy_sleep_raises_keeps_spinning(caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> Callable[[], None]:
        raise RuntimeError("can't start new thread")

    machine = Machine(awake=0.47)
    machine.policy = OpenMPWait(machine.read, refused)
    machine.run(60)
    (record,) = caplog.records
    assert "can't start new thread" in record.message
    assert not machine.policy.contended


def test_asleep_lets_the_threads_sleep_until_its_end_also_after_an_error() -> None:
    machine = Machine()
    with machine.policy.asleep():
        assert machine.sleeps
    assert not machine.sleeps
    with pytest.raises(KeyError), machine.policy.asleep():
        raise KeyError
    assert not machine.sleeps
    machine.run(60)
    assert machine.slept == 2, "without contention, steps spin"


def test_asleep_without_a_way_to_sleep_changes_nothing() -> None:
    def refused() -> Callable[[], None]:
        raise RuntimeError("can't start new thread")

    for sleep in (None, refused):
        done = False
        with OpenMPWait(dict, sleep).asleep():
            done = True
        assert done


def test_wait_policy_infrequent_steps_detect_contention() -> None:
    machine = Machine(awake=0.47, asleep=0.3)
    machine.run(3, step=1.0)
    assert machine.sleeps


def test_wait_policy_without_sleep_still_measures_contention(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine(awake=0.47)
    machine.policy = OpenMPWait(machine.read, None)
    assert machine.policy.contention is None
    machine.run(10)
    assert machine.policy.contention == pytest.approx(0.47)
    assert not caplog.records


def test_wait_policy_garbage_collected_wakes_threads() -> None:
    machine = Machine(awake=0.47)
    machine.run(1)
    assert machine.sleeps
    del machine.policy
    gc.collect()
    assert not machine.sleeps


def test_contention_ignores_threads_that_do_not_compute() -> None:
    before: Times = {"main": (0, 0), "io": (0, 0)}
    ran = {"main": (450 * MS, 50 * MS), "io": (5 * MS, 95 * MS)}
    assert contention(before, ran) == pytest.approx(0.1)
    born = {**ran, "worker": (300 * MS, 300 * MS)}
    assert contention(before, born) == pytest.approx(0.5)
    assert contention(ran, ran) is None, "an idle engine has no share"
    assert contention({}, {}) is None, "a system without these times has no share"


@pytest.fixture
def openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU's OpenMP, without environment variables that set how its threads wait."""
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    maps = Path("/proc/self/maps")
    if openmp_wait.parallel() is None or not maps.exists() or b"/libgomp" not in maps.read_bytes():
        pytest.skip("this torch does not compute with GNU's OpenMP on Linux")


@pytest.fixture
def two_cores(openmp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})


@pytest.mark.usefixtures("two_cores")
def test_idle_threads_size_depends_on_cores_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle_threads(CPU, 2) == 2
    assert idle_threads(CPU, 1) == 0, "a single thread never waits"
    assert idle_threads(CPU, 4) == 0, "more threads than cores sleep anyway"
    assert idle_threads(torch.device("cuda"), 2) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert idle_threads(CPU, 64) == 2
    assert idle_threads(CPU, 60) == 6
    assert idle_threads(CPU, 4) == 0, "a team of sixty idle threads is too large"


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("name", sorted(CHOICES))
def test_idle_threads_openmp_variable_set_returns_zero(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert idle_threads(CPU, 2) == 0


# The second thread is idle between two pieces of work. Spinning, it still uses a core.
WORKS = """
import json, time, torch
from engine.device.openmp_wait import idle_team

torch.set_num_threads(2)
numbers = torch.ones(200_000)

def cpu_share():
    began, used = time.monotonic(), time.process_time()
    for _ in range(150):
        numbers.add_(1.0)
        time.sleep(0.002)
    return (time.process_time() - used) / (time.monotonic() - began)

cpu_share()
awake = cpu_share()
wake = idle_team(2)
asleep = cpu_share()
wake()
time.sleep(0.2)
print(json.dumps([awake, asleep, cpu_share()]))
"""


@pytest.fixture
def pinned(openmp: None) -> Iterator[None]:
    """Pin processes started by the test to two cores of this machine."""
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, sorted(mine)[:2])
    yield
    os.sched_setaffinity(0, mine)


@pytest.mark.slow
@pytest.mark.usefixtures("pinned")
def test_idle_team_makes_waiting_threads_sleep() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKS], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    awake, asleep, again = json.loads(done.stdout)
    if awake < 0.5:
        pytest.skip(f"threads spin too briefly on this machine: {awake:.2f} of a core")
    assert asleep < 0.6 * awake
    assert again > 1.5 * asleep


@pytest.mark.usefixtures("openmp")
def test_idle_team_at_thread_limit_raises_runtime_error() -> None:
    """OpenMP ends the process if it cannot start a thread."""
    program = """
import resource
from engine.device.openmp_wait import idle_team

idle_team(2)()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 9 * 2**20, resource.RLIM_INFINITY))
try:
    idle_team(8)
except RuntimeError:
    print("goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_thread_times_match_psutil() -> None:
    mine = psutil.Process().threads()
    found = openmp_wait.thread_times()
    if not found:
        pytest.skip("this system does not report how long threads queue")
    by_psutil = {str(thread.id): thread.user_time + thread.system_time for thread in mine}
    main = str(os.getpid())
    assert found[main][0] / 1e9 == pytest.approx(by_psutil[main], rel=0.2, abs=0.2)
