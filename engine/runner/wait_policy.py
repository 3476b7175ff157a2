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
TRIAL = 0.2  # the same, while the threads are awake again to see whether the others have gone
BUSY = 0.02  # seconds on a core under which times say nothing
COMPUTES = 0.25  # of the busiest thread's time on a core; others, as the channel's, run for moments
# Shares of their time that threads queue for a core. Awake it is 0.45 to 0.5 beside a busy program,
# and at most 0.32 with the server and 32 clients of the smallest model on the same two cores, where
# waiting awake is still the faster; asleep 0.13 to 0.4, and nothing with the cores to themselves.
CONTENDED, FREE = 0.4, 0.05
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 32.0  # seconds asleep before a trial; doubled each time in vain
LARGEST_TEAM = 16

log = logging.getLogger(__name__)

Times = dict[str, tuple[int, int]]  # ns on a core and ns queueing for one, of each thread


class WaitPolicy:
    """Looked at before each step."""

    def __init__(
        self, read: Callable[[], Times], sleep: Callable[[], Callable[[], None]] | None
    ) -> None:
        """`read` tells the process's times; `sleep` has its threads sleep, and returns what wakes
        them again. Without it only `contention` is kept."""
        self.contention: float | None = None  # share of their time that the last look found
        self._read, self._sleep = read, sleep
        self._since, self._times = float("-inf"), Times()
        self._wake: weakref.finalize[[], WaitPolicy] | None = None  # while they sleep
        self._told = False  # that others want the cores; also while the threads are on trial
        self._pause, self._trial_at = FIRST_PAUSE, 0.0

    @classmethod
    def of_openmp(cls, device: torch.device, threads: int) -> WaitPolicy:
        """For the threads that torch computes with."""
        size = idle_threads(device, threads)
        return cls(thread_times, (lambda: idle_team(size)) if size else None)

    def look(self, now: float) -> None:
        """`now` in seconds of CLOCK_MONOTONIC; nothing is done until a window has passed."""
        on_trial = self._told and not self._wake
        if now - self._since < (TRIAL if on_trial else WINDOW):
            return
        before, self._times, self._since = self._times, self._read(), now
        share = contention(before, self._times) if before else None
        if share is None:
            return
        self.contention = share
        if self._wake:
            if share < FREE or now >= self._trial_at:
                self._wake()
                self._wake = None
        elif share > CONTENDED and self._sleep:
            self._fall_asleep(self._sleep, now, share)
        elif self._told:
            log.info("The engine has its cores to itself again; its threads wait awake.")
            self._told, self._pause = False, FIRST_PAUSE

    def _fall_asleep(
        self, sleep: Callable[[], Callable[[], None]], now: float, share: float
    ) -> None:
        if self._told:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            log.warning(
                "Other programs want the engine's cores: its threads queue for one %d %% of their "
                "time. They now sleep while they wait for each other, which costs less.",
                round(100 * share),
            )
        self._told, self._trial_at = True, now + self._pause
        self._wake = weakref.finalize(self, sleep())
        self._wake.atexit = False  # a thread that ends while the interpreter does gains nothing


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
    times = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            ran, queued, _ = path.read_text(encoding="ascii").split()
        except (OSError, ValueError):  # the thread has ended
            continue
        times[path.parent.name] = int(ran), int(queued)
    return times


def idle_threads(device: torch.device, threads: int) -> int:
    """How large a team makes those sleep that compute in `threads`; 0 where there is no choice.

    That is on a GPU, with one thread, with more of them than cores (they always sleep), where the
    environment has chosen, without GNU's OpenMP or Linux, and where it would take a team of more
    than LARGEST_TEAM, as in a container with a small share of a large machine.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    if device.type != "cpu" or threads == 1 or chosen or parallel() is None:
        return 0
    try:
        gnu = "/libgomp" in Path("/proc/self/maps").read_text(encoding="utf-8")
        # Those that compute are counted, and of the team all but the one that starts it.
        size = len(os.sched_getaffinity(0)) - threads + 2
    except (OSError, AttributeError):
        return 0
    return size if gnu and 1 < size <= LARGEST_TEAM else 0


def idle_team(size: int) -> Callable[[], None]:
    """Make a team of `size` OpenMP threads that do nothing; returns what ends it."""
    run, made, end = parallel(), threading.Event(), threading.Event()
    assert run is not None
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value  # free(NULL)
    assert nothing is not None

    def hold() -> None:
        run(nothing, 0, size, 0)
        made.set()
        end.wait()  # OpenMP ends a team's threads with the one that started it

    threading.Thread(target=hold, daemon=True).start()
    made.wait()
    return end.set
