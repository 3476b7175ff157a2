"""Processes that share the cores of a host, in simulated time."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

# Seconds. Linux 6.18 with two cores protects a turn for its slice of 1.4 ms, and ends it at a tick:
# two busy processes on one core were seen to take turns of 4 ms (CONFIG_HZ=250).
PROTECTED, TURN = 0.0014, 0.004
ROUNDING = 1e-9  # seconds


class Events:
    """Processes events in order of time; events at the same time in order of creation."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the start
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), happens))

    def run(self) -> None:
        while self._heap:
            self.now, _, happens = heapq.heappop(self._heap)
            happens()


class Host:
    """Cores that run threads in turns, as Linux does (EEVDF).

    A thread that wakes takes an idle core, or that of the thread whose turn is the longest. But a
    turn shorter than PROTECTED is not interrupted: then it waits, at most until a turn ends.
    """

    def __init__(self, events: Events, cores: float) -> None:
        """`cores` may be a fraction if other programs use the rest."""
        self.events = events
        self._idle = math.ceil(cores)
        self._speed = cores / self._idle
        self._running: list[Thread] = []
        self._ready: deque[Thread] = deque()

    def wake(self, thread: Thread) -> None:
        if self._idle:
            self._idle -= 1
            self._begin_turn(thread)
            return
        others = [other for other in self._running if other.left]
        longest = min(others, key=lambda other: other.turn_began, default=None)
        if longest is None or self.events.now < longest.turn_began + PROTECTED:
            self._ready.append(thread)
            return
        self._stop(longest)
        self._ready.append(longest)
        self._begin_turn(thread)

    def _begin_turn(self, thread: Thread) -> None:
        self._running.append(thread)
        thread.turn_began = self.events.now
        self._compute(thread)

    def _compute(self, thread: Thread) -> None:
        """Let a thread compute until its work or its turn ends."""
        thread.since = self.events.now
        thread.plans += 1
        turn = thread.turn_began + TURN - thread.since
        seconds = min(thread.left / self._speed, turn)
        self.events.after(seconds, functools.partial(self._pause, thread, thread.plans))

    def _stop(self, thread: Thread) -> None:
        """Take the core of a thread; what was planned for it is void."""
        thread.left -= (self.events.now - thread.since) * self._speed
        thread.plans += 1
        self._running.remove(thread)

    def _pause(self, thread: Thread, plan: int) -> None:
        if plan != thread.plans:
            return
        thread.left -= (self.events.now - thread.since) * self._speed
        thread.since = self.events.now
        if thread.left <= ROUNDING:
            thread.left = 0.0
            thread.process.finished(thread)  # which may wake others, and give it new work
        turn = PROTECTED if self._ready else TURN
        if thread.left and self.events.now < thread.turn_began + turn - ROUNDING:
            self._compute(thread)
            return
        self._running.remove(thread)
        if thread.left:
            self._ready.append(thread)
        if self._ready:
            self._begin_turn(self._ready.popleft())
        else:
            self._idle += 1


class Thread:
    """One of a process's threads. Its host changes the attributes."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.left = 0.0  # seconds of work; 0 while it sleeps
        self.turn_began = self.since = 0.0
        self.plans = 0


class Process:
    """Does its pieces of work in order of arrival, each with all of its threads."""

    def __init__(self, host: Host, threads: int = 1) -> None:
        self._host = host
        self._threads = [Thread(self) for _ in range(threads)]
        self._busy = 0  # threads
        self.worked = 0.0  # seconds of all threads together
        self._work: deque[tuple[float, Callable[[], None]]] = deque()

    def do(self, seconds: float, then: Callable[[], None]) -> None:
        """Work for `seconds` on as many cores as there are threads, then call `then`."""
        self.worked += seconds * len(self._threads)
        self._work.append((max(seconds, 2 * ROUNDING), then))
        if len(self._work) == 1:
            self._begin(None)

    def _begin(self, current: Thread | None) -> None:
        """Begin the first piece of work; `current` is the thread that has a core already."""
        self._busy = len(self._threads)
        for thread in self._threads:
            thread.left = self._work[0][0]
        for thread in self._threads:
            if thread is not current:
                self._host.wake(thread)

    def finished(self, thread: Thread) -> None:
        """Note that a thread has done its part; the last one ends the piece of work."""
        self._busy -= 1
        if self._busy:
            return
        _, then = self._work[0]
        then()
        self._work.popleft()
        if self._work:
            self._begin(thread)
