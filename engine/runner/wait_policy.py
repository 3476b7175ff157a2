"""How a CPU engine's threads wait for each other: awake, or asleep where others want the cores.

In a step they wait some hundred times for the slowest of them. Awake they go on at once; but where
another program has taken a thread's core, the others keep theirs from it while they wait for it,
and one busy program makes a step ten times as long. Asleep they leave it a core, and a step takes
little longer than the program's share of the cores; with cores of their own it would take half as
long again. So they are awake until they are seen to queue for cores (docs/operations.md: figures).

GNU's OpenMP has no call for it, but a rule of its own: while there are more of its threads than
cores, those that wait look a hundred times and not 300,000 before they sleep (`do_spin` in its file
config/linux/wait.h). A team of threads that do nothing is enough for that.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from engine.kernels.cpu.threads import parallel

WINDOW = 0.5  # seconds between two looks at the threads' times
TRIAL = 0.2  # the first after the threads were woken to see whether the others have gone
BUSY = 0.02  # seconds on a core under which times say nothing
COMPUTES = 0.25  # of the busiest thread's time on a core; others, as the channel's, run for moments
# Shares of their time that threads queue for a core, on two cores. Awake it is 0.45 to 0.5 beside a
# busy program, and at most 0.32 with the server and 32 clients of the smallest model, where waiting
# awake is still the faster; asleep 0.13 to 0.4, and nothing with the cores to themselves.
CONTENDED, FREE = 0.4, 0.05
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 32.0  # seconds asleep before a trial; doubled each time in vain
CALM = 30.0  # seconds awake after which the others have gone
LARGEST_TEAM = 16
# What says how OpenMP's threads wait, or makes cores and threads other than they seem.
CHOICES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "OMP_DYNAMIC", "OMP_THREAD_LIMIT"}

log = logging.getLogger(__name__)

Times = dict[str, tuple[int, int]]  # ns on a core and ns queueing for one, of each thread
Sleep = Callable[[], Callable[[], None]]  # has the threads sleep, and returns what wakes them


class WaitPolicy:
    """Looked at before each step."""

    def __init__(self, read: Callable[[], Times], sleep: Sleep | None) -> None:
        """`read` tells the process's times. Without `sleep` only `contention` is kept."""
        self.contention: float | None = None  # share of their time that the last look found
        self.contended = False  # others want the cores: the threads sleep, or are awake on trial
        self._read, self._sleep = read, sleep
        self._since, self._times, self._window = float("-inf"), Times(), WINDOW
        self._wake: weakref.finalize[[], WaitPolicy] | None = None  # while they sleep
        self._pause, self._trial_at, self._woken_at = FIRST_PAUSE, 0.0, 0.0

    @classmethod
    def of_openmp(cls, device: torch.device, threads: int) -> WaitPolicy:
        """For the threads that torch computes with."""
        size = idle_threads(device, threads)
        return cls(thread_times, (lambda: idle_team(size)) if size else None)

    def look(self, now: float) -> None:
        """`now` in seconds of CLOCK_MONOTONIC; nothing is done until a window has passed."""
        if now - self._since < self._window:
            return
        before, self._times = self._times, self._read()
        self._since, self._window = now, WINDOW
        share = contention(before, self._times) if before else None
        if share is None:
            return
        self.contention = share
        if self._wake:
            # Once a trial was in vain, how little they queue asleep tells nothing.
            if now >= self._trial_at or (share < FREE and self._pause == FIRST_PAUSE):
                self._wake()
                self._wake, self._woken_at, self._window = None, now, TRIAL
        elif share > CONTENDED and self._sleep:
            self._fall_asleep(self._sleep, now, share)
        elif self.contended and now - self._woken_at > CALM:
            log.info("For %d s nobody has kept cores from the engine's threads.", CALM)
            self.contended, self._pause = False, FIRST_PAUSE

    def _fall_asleep(self, sleep: Sleep, now: float, share: float) -> None:
        try:
            self._wake = weakref.finalize(self, sleep())
        except RuntimeError as error:  # no more threads
            log.warning("The engine's threads go on waiting awake: %s", error)
            self._sleep = None
            return
        self._wake.atexit = False  # a thread that ends while the interpreter does gains nothing
        if self.contended:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            log.warning(
                "Other programs, the container's limit or too many --threads keep cores from the "
                "engine's threads: they queue for one %d %% of their time. They now sleep where "
                "they wait for each other, which costs less.",
                round(100 * share),
            )
        self.contended, self._trial_at = True, now + self._pause


def contention(before: Times, after: Times) -> float | None:
    """The largest share of its time that a thread which computes queued for a core; None where none
    has computed."""
    spent = []
    for thread, (ran, queued) in after.items():
        ran_before, queued_before = before.get(thread, (0, 0))
        spent.append((ran - ran_before, queued - queued_before))
    most = max((ran for ran, _ in spent), default=0)
    if most < BUSY * 1e9:
        return None
    return max(queued / (ran + queued) for ran, queued in spent if ran > COMPUTES * most)


def thread_times() -> Times:
    """Of this process's threads, as Linux has them; empty where it does not say."""
    times: Times = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return times
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
                ran, queued, _ = file.read(100).split()
        except (OSError, ValueError):  # it has ended
            continue
        times[thread] = int(ran), int(queued)
    return times


def idle_threads(device: torch.device, threads: int) -> int:
    """How large a team makes those sleep that compute in `threads`; 0 where there is no choice.

    That is on a GPU, with one thread, with more of them than cores (they always sleep), where the
    environment has chosen, without GNU's OpenMP or Linux, and where it would take a team of more
    than LARGEST_TEAM, as in a container with a small share of a large machine.
    """
    if device.type != "cpu" or threads == 1 or CHOICES & os.environ.keys() or parallel() is None:
        return 0
    try:
        gnu = b"/libgomp" in Path("/proc/self/maps").read_bytes()
        # Those that compute are counted, and of the team all but the one that starts it.
        size = len(os.sched_getaffinity(0)) - threads + 2
    except (OSError, AttributeError):
        return 0
    return size if gnu and 1 < size <= LARGEST_TEAM else 0


def idle_team(size: int) -> Callable[[], None]:
    """Make a team of `size` OpenMP threads that do nothing; returns what ends it.

    Raises RuntimeError where no more threads can be had. OpenMP would end the process there, so as
    many are tried before.
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
        end.wait()  # OpenMP ends a team's threads with the one that started it

    try:
        for thread in others:
            thread.start()
        threading.Thread(target=hold, daemon=True).start()
    finally:
        tried.set()
    made.wait()
    return end.set
