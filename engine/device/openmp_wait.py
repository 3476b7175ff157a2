"""Choose how a CPU engine's threads wait for each other: spinning, or asleep if cores are scarce.

In a step, threads wait about a hundred times for the slowest of them. A spinning thread continues
at once. But if another program takes one thread's core, the other threads occupy their cores while
they wait. One busy program then makes a step ten times as long. Sleeping threads leave a core to
the program, and the step slows down by little more than the program's share of the cores. Without
other programs, sleeping makes a step 50 % longer. So the threads spin until they are seen to queue
for cores (docs/cpu.md has the figures).

GNU's OpenMP has no call to choose this. But if it has more threads than cores, a waiting thread
checks a hundred times instead of 300,000 before it sleeps (`do_spin` in its config/linux/wait.h).
A team of idle threads is enough to cause that.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from engine.device.openmp import parallel

WINDOW = 0.5  # seconds between two readings of the threads' times
TRIAL = 0.2  # seconds from the start of a trial, which wakes the threads, to its first reading
BUSY = 0.02  # seconds on a core; with less in a window, the times are not meaningful
# Only threads with this share of the busiest thread's core time count; not those of the channel.
COMPUTES = 0.25
# Share of their time that threads queue for a core, measured on two cores. Spinning, they queue
# 0.45 to 0.5 while a busy program runs. They queue at most 0.32 while the server and 32 clients of
# the smallest model run, and spinning is still faster there. Asleep, they queue 0.13 to 0.4, and 0
# without other programs.
CONTENDED, FREE = 0.4, 0.05
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 32.0  # seconds asleep before a trial; doubled if a trial fails
CALM = 30.0  # seconds of spinning without contention, after which contention is over
LARGEST_TEAM = 16
# Variables that set how OpenMP's threads wait, or that change how many cores and threads it uses.
CHOICES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "OMP_DYNAMIC", "OMP_THREAD_LIMIT"}

log = logging.getLogger(__name__)

Times = dict[str, tuple[int, int]]  # per thread: ns on a core, ns in the queue for one
Sleep = Callable[[], Callable[[], None]]  # makes waiting threads sleep; returns the call to undo it


class OpenMPWait:
    """Switches the threads between spinning and sleeping. Call `poll` before each step."""

    def __init__(self, read: Callable[[], Times], sleep: Sleep | None) -> None:
        """`read` returns the times of the process. Without `sleep`, only `contention` is set."""
        self.contention: float | None = None  # share of time queued, from the last reading
        self.contended = False  # cores are scarce: the threads sleep, or spin for a trial
        self._read, self._sleep = read, sleep
        self._since, self._times, self._window = float("-inf"), Times(), WINDOW
        self._wake: weakref.finalize[[], OpenMPWait] | None = None  # while they sleep
        self._pause, self._trial_at, self._woken_at = FIRST_PAUSE, 0.0, 0.0

    @classmethod
    def for_threads(cls, device: torch.device, threads: int) -> OpenMPWait:
        """Return the policy for the `threads` OpenMP threads that torch computes with."""
        size = idle_threads(device, threads)
        return cls(thread_times, (lambda: idle_team(size)) if size else None)

    def poll(self, now: float) -> None:
        """Read the times and switch if needed; do nothing until a window has passed.

        `now` is in seconds of CLOCK_MONOTONIC.
        """
        if now - self._since < self._window:
            return
        before, self._times = self._times, self._read()
        self._since, self._window = now, WINDOW
        share = contention(before, self._times) if before else None
        if share is None:
            return
        self.contention = share
        if self._wake:
            # After a failed trial, a low share of sleeping threads no longer shows that cores are
            # free: wait for the next trial.
            if now >= self._trial_at or (share < FREE and self._pause == FIRST_PAUSE):
                self._wake()
                self._wake, self._woken_at, self._window = None, now, TRIAL
        elif share > CONTENDED and self._sleep:
            self._fall_asleep(self._sleep, now, share)
        elif self.contended and now - self._woken_at > CALM:
            log.info("The engine's threads have not had to queue for cores for %d s.", CALM)
            self.contended, self._pause = False, FIRST_PAUSE

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """Let the threads sleep while they wait, if that can be chosen.

        While weights are packed, one thread often works alone. The others would spin through that
        time, and on a busy machine for several times as long.
        """
        wake: Callable[[], None] | None = None
        if self._sleep is not None:
            with contextlib.suppress(RuntimeError):  # no more threads
                wake = self._sleep()
        try:
            yield
        finally:
            if wake is not None:
                wake()

    def gauges(self) -> dict[str, float]:
        """Return the measurements for /metrics; empty until threads have computed for a while."""
        if self.contention is None:
            return {}
        return {
            "engine_cpu_contention": self.contention,
            "engine_cpu_contended": float(self.contended),
        }

    def _fall_asleep(self, sleep: Sleep, now: float, share: float) -> None:
        try:
            self._wake = weakref.finalize(self, sleep())
        except RuntimeError as error:  # no more threads
            log.warning("Cannot let the engine's threads sleep while they wait: %s", error)
            self._sleep = None
            return
        self._wake.atexit = False  # no need to end the idle team when the interpreter exits
        if self.contended:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            log.warning(
                "The engine's threads queue for a core %d %% of their time, so they now sleep "
                "while they wait for each other. Other programs, a container limit or too many "
                "--threads take the cores. Give the engine more cores or lower --threads.",
                round(100 * share),
            )
        self.contended, self._trial_at = True, now + self._pause


def contention(before: Times, after: Times) -> float | None:
    """Return the largest share of its time that a computing thread queued for a core.

    Returns None if no thread computed between the two readings.
    """
    spent = []
    for thread, (ran, queued) in after.items():
        ran_before, queued_before = before.get(thread, (0, 0))
        spent.append((ran - ran_before, queued - queued_before))
    most = max((ran for ran, _ in spent), default=0)
    if most < BUSY * 1e9:
        return None
    return max(queued / (ran + queued) for ran, queued in spent if ran > COMPUTES * most)


def thread_times() -> Times:
    """Return the times of this process's threads from Linux's schedstat; empty if unavailable."""
    times: Times = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return times
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
                ran, queued, _ = file.read(100).split()
        except (OSError, ValueError):  # the thread has ended
            continue
        times[thread] = int(ran), int(queued)
    return times


def idle_threads(device: torch.device, threads: int) -> int:
    """Return the size of the idle team that makes `threads` computing threads sleep as they wait.

    Returns 0 if the waiting cannot or need not be changed: on a GPU; with one thread; with more
    threads than cores, which always sleep; if an environment variable in CHOICES is set; without
    GNU's OpenMP or Linux; or if the team would be larger than LARGEST_TEAM, as in a container with
    a small share of a large machine.
    """
    if device.type != "cpu" or threads == 1 or CHOICES & os.environ.keys() or parallel() is None:
        return 0
    try:
        gnu = b"/libgomp" in Path("/proc/self/maps").read_bytes()
        # OpenMP counts the computing threads and the team, except for the thread that starts it.
        size = len(os.sched_getaffinity(0)) - threads + 2
    except (OSError, AttributeError):
        return 0
    return size if gnu and 1 < size <= LARGEST_TEAM else 0


def idle_team(size: int) -> Callable[[], None]:
    """Start a team of `size` OpenMP threads that do nothing; return the function that ends it.

    Raises RuntimeError if that many threads cannot be started. OpenMP would end the process then,
    so the same number of Python threads is started first as a test.
    """
    run, tried, made, end = parallel(), threading.Event(), threading.Event(), threading.Event()
    assert run is not None
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value  # free(NULL)
    assert nothing is not None
    others = [threading.Thread(target=tried.wait, daemon=True) for _ in range(size - 1)]

    def hold() -> None:
        tried.wait()
        for other in others:
            other.join()
        run(nothing, 0, size, 0)
        made.set()
        end.wait()  # OpenMP ends the threads of a team when the thread that started it ends

    try:
        for thread in others:
            thread.start()
        threading.Thread(target=hold, daemon=True).start()
    finally:
        tried.set()
    made.wait()
    return end.set
