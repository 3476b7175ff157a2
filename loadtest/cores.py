"""Processes that share the cores of a host, in simulated time."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable


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
    """Cores that the threads with work share equally.

    The kernel's scheduler gives runnable threads their turns, each of a few milliseconds. Equal
    shares at every instant are the limit for short turns.
    """

    def __init__(self, events: Events, cores: float) -> None:
        """`cores` may be a fraction if other programs use the rest."""
        self.events = events
        self._cores = cores
        self._left: dict[Process, float] = {}  # seconds of work of each busy process
        self._since = 0.0  # when `_left` was true
        self._plans = 0

    def start(self, process: Process, seconds: float) -> None:
        """Let an idle process begin a piece of work; `finished` is called at its end."""
        self._advance()
        self._left[process] = seconds
        self._plan()

    @property
    def _speed(self) -> float:
        """The share of a core that each thread has."""
        threads = sum(process.threads for process in self._left)
        return min(1.0, self._cores / threads)

    def _advance(self) -> None:
        now = self.events.now
        if self._left:
            done = (now - self._since) * self._speed
            for process in self._left:
                self._left[process] -= done
        self._since = now

    def _plan(self) -> None:
        """Plan the next end of a piece of work; every change replaces the plan."""
        self._plans += 1
        if self._left:
            first = min(self._left, key=self._left.__getitem__)
            seconds = max(0.0, self._left[first]) / self._speed
            self.events.after(seconds, functools.partial(self._end, first, self._plans))

    def _end(self, process: Process, plan: int) -> None:
        if plan != self._plans:
            return
        self._advance()
        del self._left[process]
        self._plan()
        process.finished()


class Process:
    """Does its pieces of work in order of arrival, with `threads` threads at a time."""

    def __init__(self, host: Host, threads: int = 1) -> None:
        self.threads = threads
        self._host = host
        self._work: deque[tuple[float, Callable[[], None]]] = deque()

    def do(self, seconds: float, then: Callable[[], None]) -> None:
        """Work for `seconds` on as many cores as there are threads, then call `then`."""
        self._work.append((seconds, then))
        if len(self._work) == 1:
            self._host.start(self, seconds)

    def finished(self) -> None:
        _, then = self._work.popleft()
        if self._work:
            self._host.start(self, self._work[0][0])
        then()
