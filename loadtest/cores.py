"""Processes that share the cores of a host, in simulated time.

The rules are those of Linux 6.18 (EEVDF), reduced to threads of equal weight on cores that share a
cache: a thread is served by its virtual runtime, which lags or leads the mean of its core's queue.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable

# Seconds. The slice is 0.7 ms * (1 + log2 of the cores), here of two. CONFIG_HZ is 250.
SLICE, TICK = 0.0014, 0.004
MOST_LAG = max(2 * SLICE, TICK)
CACHE_HOT = 0.0005  # a core that becomes idle takes no thread that has run since
HALF_LIFE = 0.032  # of a core's utilization
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


class Thread:
    """One of a process's threads. Virtual times are seconds of the queue of its core."""

    def __init__(self, process: Process, core: Core) -> None:
        self.process = process
        self.core = self.earlier = core  # where it runs or ran, and before that
        self.left = 0.0  # seconds of work; 0 while it sleeps
        self.stopped = -1.0  # when it ran last
        self.runtime = self.deadline = self.protected = 0.0  # virtual
        self.lag = 0.0  # virtual time that its core owes it while it sleeps
        self.lingers = False  # it sleeps, but stays in the queue until its lead is used up


class Core:
    """A core with its queue."""

    def __init__(self, events: Events, speed: float) -> None:
        self._events = events
        self._speed = speed
        self.running: Thread | None = None
        self.waiting: list[Thread] = []
        self._since = 0.0
        self._plans = 0
        self._runtime = 0.0  # of the last thread, for an empty queue
        self._utilization = 0.0
        self._measured = 0.0
        self._ticks = False
        self._ends = False
        self.became_idle: Callable[[Core], None] = lambda core: None
        self.ticked: Callable[[Core], None] = lambda core: None

    @property
    def load(self) -> int:
        return (self.running is not None) + sum(not thread.lingers for thread in self.waiting)

    @property
    def utilization(self) -> float:
        """The share of time that it was busy, with older times counting less."""
        now = self._events.now
        decay = 0.5 ** ((now - self._measured) / HALF_LIFE)
        busy = 1.0 if self.running else 0.0
        self._utilization = busy + (self._utilization - busy) * decay
        self._measured = now
        return self._utilization

    def _mean(self) -> float:
        queued = [*self.waiting, self.running] if self.running else self.waiting
        if not queued:
            return self._runtime
        return sum(thread.runtime for thread in queued) / len(queued)

    def account(self) -> bool:
        """Account for the time that the running thread ran; return if it used up its slice."""
        thread = self.running
        if thread is None:
            return False
        ran, self._since = self._events.now - self._since, self._events.now
        thread.runtime += ran
        thread.left = max(0.0, thread.left - ran * self._speed)
        if thread.runtime < thread.deadline - ROUNDING:
            return False
        thread.deadline = thread.runtime + SLICE
        return True

    def add(self, thread: Thread) -> None:
        """Queue a thread that wakes, or that another core gives up. It may interrupt."""
        contended = bool(self.waiting)
        is_over = self.account()
        if thread.lingers:
            thread.lingers = False
            self.waiting.remove(thread)
            mean = sum(t.runtime for t in (*self.waiting, thread, *([self.running] if self.running else [])))
            mean /= len(self.waiting) + 1 + (self.running is not None)
            if thread.runtime < mean:
                thread.lag = 0.0
                self._place(thread)
        else:
            self._place(thread)
        thread.earlier, thread.core = (thread.core if thread.core is not self else thread.earlier), self
        if self.running is None:
            self._run(thread)
            return
        self.waiting.append(thread)
        current = self.running
        if self._ends:
            return
        must = contended and (is_over or current.protected <= current.runtime)
        if must or self._best() is thread:
            self._switch()

    def _place(self, thread: Thread) -> None:
        count = len(self.waiting) + (self.running is not None)
        lag = thread.lag * (count + 1) / count if count else 0.0
        thread.runtime = self._mean() - lag
        thread.deadline = thread.runtime + SLICE

    def _best(self) -> Thread | None:
        """Return the thread to run now: of those that are owed time, the one with the earliest deadline."""
        mean = self._mean() + ROUNDING
        current = self.running
        if current and (current.runtime > mean or not current.left):
            current = None
        if current and current.protected > current.runtime:
            return current
        owed = [thread for thread in self.waiting if thread.runtime <= mean]
        best = min(owed, key=lambda thread: thread.deadline, default=None)
        if best is None or (current and current.deadline < best.deadline - ROUNDING):
            return current
        return best

    def _switch(self) -> None:
        """Run the best thread; the running one waits."""
        best = self._next()
        current = self.running
        if best is None or best is current:
            return
        assert current
        current.stopped = self._events.now
        self.waiting.append(current)
        self.waiting.remove(best)
        self._run(best)

    def _next(self) -> Thread | None:
        """Return the best thread, and let those leave that sleep."""
        while (best := self._best()) and best.lingers:
            best.lingers = False
            best.lag = 0.0
            self.waiting.remove(best)
        return best

    def _run(self, thread: Thread) -> None:
        self.utilization  # of the time before
        self.running = thread
        thread.protected = thread.deadline
        self._since = self._events.now
        self._plan()
        if not self._ticks:
            self._ticks = True
            self._events.after(TICK - self._events.now % TICK, self._tick)

    def _plan(self) -> None:
        assert self.running
        self._plans += 1
        seconds = self.running.left / self._speed
        self._events.after(seconds, functools.partial(self._pause, self._plans))

    def _pause(self, plan: int) -> None:
        """End the piece of work of the running thread."""
        if plan != self._plans:
            return
        self.account()
        thread = self.running
        assert thread
        if thread.left > ROUNDING:
            self._plan()
            return
        thread.left = 0.0
        self._ends = True
        thread.process.finished(thread)
        self._ends = False
        if thread.left:
            self._plan()
            self._switch()
            return
        self._sleep(thread)

    def _sleep(self, thread: Thread) -> None:
        self.utilization
        lag = self._mean() - thread.runtime
        thread.lag = max(-MOST_LAG, min(MOST_LAG, lag))
        thread.stopped = self._events.now
        self._runtime = thread.runtime
        self._plans += 1
        self.running = None
        if lag < -ROUNDING and self.waiting:
            thread.lingers = True
            self.waiting.append(thread)
        best = self._next()
        if best:
            self.waiting.remove(best)
            self._run(best)
        else:
            self.became_idle(self)

    def _tick(self) -> None:
        if self.running is None:
            self._ticks = False
            return
        self._events.after(TICK, self._tick)
        is_over = self.account()
        if self.waiting and (is_over or self.running.protected <= self.running.runtime):
            self._switch()
        self.ticked(self)

    def give(self, least_rest: float) -> Thread | None:
        """Remove and return a waiting thread that has not run for `least_rest` seconds."""
        self.account()
        for thread in self.waiting:
            if not thread.lingers and thread.stopped <= self._events.now - least_rest:
                lag = self._mean() - thread.runtime
                thread.lag = max(-MOST_LAG, min(MOST_LAG, lag))
                self.waiting.remove(thread)
                return thread
        return None


class Host:
    """Cores that run threads in turns."""

    def __init__(self, events: Events, cores: float) -> None:
        """`cores` may be a fraction if other programs use the rest."""
        self.events = events
        count = -int(-cores // 1)
        self.cores = [Core(events, cores / count) for _ in range(count)]
        self.waker: Thread | None = None
        for core in self.cores:
            core.became_idle = self._pull
            core.ticked = self._balance

    def wake(self, thread: Thread) -> None:
        core = thread.core if thread.lingers else self._choose(thread, self.waker)
        core.add(thread)

    def _choose(self, thread: Thread, waker: Thread | None) -> Core:
        before = thread.core
        target = before
        here = waker.core if waker else before
        if here is not before and before.running:
            if here.load == 1 or here.load <= before.load: target = here
        for core in (target, before, thread.earlier):
            if core.running is None:
                return core
        used = sum(core.utilization for core in self.cores) / len(self.cores)
        if len(self.cores) * (1 - (1.17 * used) ** 2) >= 1:
            for core in self.cores:
                if core.running is None:
                    return core
        return target

    def _pull(self, idle: Core, least_rest: float = CACHE_HOT) -> None:
        busiest = max(self.cores, key=lambda core: core.load)
        if busiest.load > 1 and (thread := busiest.give(least_rest)):
            idle.add(thread)

    def _balance(self, busy: Core) -> None:
        if busy.load < 2:
            return
        for core in self.cores:
            if core.running is None:
                self._pull(core, 0.0)
                return


class Process:
    """Does its pieces of work in order of arrival, each with all of its threads."""

    def __init__(self, host: Host, threads: int = 1, core: int = 0) -> None:
        self._host = host
        self._threads = [Thread(self, host.cores[(core+i) % len(host.cores)]) for i in range(threads)]
        self._busy = 0  # threads
        self.worked = 0.0  # seconds of all threads together
        self._work: deque[tuple[float, Callable[[], None]]] = deque()

    def do(self, seconds: float, then: Callable[[], None]) -> None:
        """Work for `seconds` on as many cores as there are threads, then call `then`."""
        self.worked += seconds * len(self._threads)
        self._work.append((max(seconds, 2 * ROUNDING), then))
        if len(self._work) == 1:
            self._begin(None)

    def do_next(self, seconds: float, then: Callable[[], None]) -> None:
        """Do a piece of work before those that wait; only a piece that just ends may call it."""
        self.worked += seconds * len(self._threads)
        self._work.insert(1, (max(seconds, 2 * ROUNDING), then))

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
        self._host.waker = thread
        then()
        self._host.waker = None
        self._work.popleft()
        if self._work:
            self._begin(thread)
