"""Processes that share the cores of a host, in simulated time.

The rules are those of Linux 6.18 (EEVDF, kernel/sched/fair.c) for threads of equal weight on cores
that share a cache. Each core has a queue. A thread's virtual runtime is the time that it has run.
Its lag is what it lacks to the mean of the queue. Of the threads that are owed time, the one with
the earliest deadline runs.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

# Seconds. The slice is 0.7 ms * (1 + log2(cores)), here of two cores. CONFIG_HZ is 250.
SLICE, TICK = 0.0014, 0.004
MOST_LAG = max(2 * SLICE, TICK)
CACHE_HOT = 0.0005  # a core that becomes idle takes no thread that ran more recently
HALF_LIFE = 0.032  # of a core's utilization
IMBALANCE = 1.17  # a wake-up searches fewer idle cores at high utilization (SIS_UTIL)
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
    """One of a process's threads. Its core changes the attributes."""

    def __init__(self, process: Process, core: Core) -> None:
        self.process = process
        self.core = self.earlier = core  # where it runs or ran, and before that
        self.left = 0.0  # seconds of work; 0 while it sleeps
        self.stopped = -math.inf  # when it ran last
        self.runtime = self.deadline = 0.0  # virtual
        self.protected = 0.0  # virtual runtime until which it keeps its core while it is owed time
        self.lag = 0.0  # while it is in no queue
        self.lingers = False  # asleep, but queued until the others have used up its lead


class Core:
    """A core with its queue."""

    def __init__(self, host: Host, speed: float) -> None:
        self._host = host
        self._events = host.events
        self._speed = speed
        self.running: Thread | None = None
        self.waiting: list[Thread] = []
        self._since = 0.0  # when the running thread was accounted for
        self._plans = 0
        self._runtime = 0.0  # virtual, of an empty queue
        self._ends_work = False
        self._woken: list[Thread] = []  # by the work that ends
        self._ticks = False
        self._warm: set[Process] = set()  # those that have run since the core was idle
        self._utilization = self._measured = 0.0

    @property
    def load(self) -> int:
        """The number of threads with work."""
        return (self.running is not None) + sum(not thread.lingers for thread in self.waiting)

    def utilization(self) -> float:
        """Return the share of the time that the core was busy; earlier times count less."""
        now, is_busy = self._events.now, float(self.running is not None)
        decay = 0.5 ** ((now - self._measured) / HALF_LIFE)
        self._utilization = is_busy + (self._utilization - is_busy) * decay
        self._measured = now
        return self._utilization

    def add(self, thread: Thread) -> None:
        """Queue a thread with work. It may interrupt the running one."""
        is_contended = bool(self.waiting)
        is_over = self._account()
        if thread.lingers:
            self._resume(thread)
        else:
            self._place(thread)
            if thread.core is not self:
                thread.earlier, thread.core = thread.core, self
            if self.running is None:
                self._run(thread)
                return
            self.waiting.append(thread)
        if self._ends_work:
            self._woken.append(thread)  # the running thread may be about to sleep
            return
        assert self.running
        is_over = is_over or self.running.protected <= self.running.runtime
        if (is_contended and is_over) or self._best() is thread:
            self._switch()

    def give(self, rest: float) -> Thread | None:
        """Remove and return a waiting thread that has not run for `rest` seconds."""
        self._account()
        for thread in self.waiting:
            if not thread.lingers and thread.stopped <= self._events.now - rest:
                thread.lag = self._lag(thread)
                self.waiting.remove(thread)
                return thread
        return None

    def _mean(self) -> float:
        """Return the mean virtual runtime of the queue."""
        queued = list(self.waiting)
        if self.running is not None:
            queued.append(self.running)
        if not queued:
            return self._runtime
        return sum(thread.runtime for thread in queued) / len(queued)

    def _lag(self, thread: Thread) -> float:
        return max(-MOST_LAG, min(MOST_LAG, self._mean() - thread.runtime))

    def _account(self) -> bool:
        """Account for the running thread's time; return whether it has used up its slice."""
        thread = self.running
        if thread is None:
            return False
        ran = self._events.now - self._since
        self._since = self._events.now
        thread.runtime += ran
        thread.left = max(0.0, thread.left - ran * self._speed)
        if thread.runtime < thread.deadline - ROUNDING:
            return False
        thread.deadline = thread.runtime + SLICE
        return True

    def _place(self, thread: Thread) -> None:
        """Give a thread its place in the queue, which moves the mean: its lag then holds."""
        count = len(self.waiting) + (self.running is not None)
        lag = thread.lag * (count + 1) / count if count else 0.0
        thread.runtime = self._mean() - lag
        thread.deadline = thread.runtime + SLICE

    def _resume(self, thread: Thread) -> None:
        """Let a thread wake that is still queued."""
        thread.lingers = False
        if self._lag(thread) > 0:
            thread.lag = 0.0
            self.waiting.remove(thread)
            self._place(thread)
            self.waiting.append(thread)

    def _best(self) -> Thread | None:
        """Return the thread to run now, which may be the running one."""
        mean = self._mean() + ROUNDING
        current = self.running
        if current is not None and (current.runtime > mean or not current.left):
            current = None
        if current is not None and current.protected > current.runtime:
            return current
        owed = [thread for thread in self.waiting if thread.runtime <= mean]
        best = min(owed, key=lambda thread: thread.deadline, default=None)
        if current is None or best is None:
            return best or current
        return current if current.deadline < best.deadline - ROUNDING else best

    def _next(self) -> Thread | None:
        """Return the best thread with work. Sleeping ones that are best leave the queue."""
        while (best := self._best()) and best.lingers:
            best.lingers = False
            best.lag = 0.0
            self.waiting.remove(best)
        return best

    def _switch(self) -> None:
        """Run the best thread. The running one then waits."""
        best, current = self._next(), self.running
        if best is None or current is None or best is current:
            return
        current.stopped = self._events.now
        self.waiting.remove(best)
        self.waiting.append(current)
        self._run(best)

    def _run(self, thread: Thread) -> None:
        self.utilization()
        self.running = thread
        if thread.process not in self._warm:
            self._warm.add(thread.process)
            thread.left += thread.process.fill_caches()
        thread.protected = thread.deadline
        self._since = self._events.now
        self._plan()
        if not self._ticks:
            self._ticks = True
            self._events.after(TICK - self._events.now % TICK, self._tick)

    def _plan(self) -> None:
        """Plan the end of the running thread's work. Earlier plans are void."""
        assert self.running
        self._plans += 1
        seconds = self.running.left / self._speed
        self._events.after(seconds, functools.partial(self._end_work, self._plans))

    def _end_work(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._account()
        thread = self.running
        assert thread
        if thread.left > ROUNDING:
            self._plan()
            return
        thread.left = 0.0
        self._ends_work = True
        thread.process.finished(thread)  # which may wake others, and give it new work
        self._ends_work = False
        woken, self._woken = self._woken, []
        if not thread.left:
            self._sleep(thread)
            return
        self._plan()
        if self._best() in woken:
            self._switch()

    def _sleep(self, thread: Thread) -> None:
        self.utilization()
        thread.lag = self._lag(thread)
        thread.stopped = self._events.now
        self._runtime = thread.runtime
        self._plans += 1
        self.running = None
        if thread.lag < -ROUNDING and self.waiting:
            thread.lingers = True
            self.waiting.append(thread)
        if (best := self._next()) is None:
            self._warm.clear()
            self._host.pull(self, CACHE_HOT)
        else:
            self.waiting.remove(best)
            self._run(best)

    def _tick(self) -> None:
        if self.running is None:
            self._ticks = False
            return
        self._events.after(TICK, self._tick)
        is_over = self._account()
        if self.waiting and (is_over or self.running.protected <= self.running.runtime):
            self._switch()
        self._host.balance(self)


class Host:
    """Cores that share a cache."""

    def __init__(self, events: Events, cores: float) -> None:
        """`cores` may be a fraction if other programs use the rest."""
        self.events = events
        count = math.ceil(cores)
        self.cores = [Core(self, cores / count) for _ in range(count)]
        self.waker: Thread | None = None  # the thread whose work just ended; None at a timer

    def wake(self, thread: Thread) -> None:
        core = thread.core if thread.lingers else self._choose(thread)
        core.add(thread)

    def _choose(self, thread: Thread) -> Core:
        """Return the core for a thread that wakes: an idle one if Linux would find it."""
        before = target = thread.core
        here = self.waker.core if self.waker else before
        if before.running is not None and (here.load == 1 or here.load <= before.load):
            target = here
        for core in (target, before, thread.earlier):
            if core.running is None:
                return core
        used = sum(core.utilization() for core in self.cores) / len(self.cores)
        if len(self.cores) * (1 - (IMBALANCE * used) ** 2) >= 1:
            target = next((core for core in self.cores if core.running is None), target)
        return target

    def pull(self, idle: Core, rest: float) -> None:
        """Let an idle core run a thread that waits elsewhere and has not run for `rest` seconds."""
        busiest = max(self.cores, key=lambda core: core.load)
        if busiest.load > 1 and (thread := busiest.give(rest)):
            idle.add(thread)

    def balance(self, busy: Core) -> None:
        """Let an idle core help a busy one, as at a tick."""
        idle = next((core for core in self.cores if core.running is None), None)
        if idle is not None and busy.load > 1:
            self.pull(idle, 0.0)


class Process:
    """Does its pieces of work in order of arrival, each with all of its threads.

    A piece that wakes the process takes `wake` seconds longer. After a core has been idle, its
    caches are cold: the process's first piece there takes `cold` seconds longer.
    """

    def __init__(self, host: Host, threads: int = 1, wake: float = 0.0, cold: float = 0.0) -> None:
        self._host = host
        self._wake, self._cold = wake, cold
        cores = itertools.islice(itertools.cycle(host.cores), threads)
        self._threads = [Thread(self, core) for core in cores]
        self._busy = 0  # threads
        self.worked = 0.0  # seconds of all threads together
        self._work: deque[tuple[float, Callable[[], None]]] = deque()

    def do(self, seconds: float, then: Callable[[], None]) -> None:
        """Work for `seconds` on as many cores as there are threads, then call `then`."""
        sleeps = not self._work
        self._note(len(self._work), seconds + self._wake * sleeps, then)
        if sleeps:
            self._begin(None)

    def do_next(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        """Work before the pieces that wait. Only the piece that just ends calls this."""
        self._note(1, seconds, then)

    def _note(self, index: int, seconds: float, then: Callable[[], None]) -> None:
        self.worked += seconds * len(self._threads)
        self._work.insert(index, (max(seconds, 2 * ROUNDING), then))

    def _begin(self, current: Thread | None) -> None:
        """Begin the first piece of work; `current` is the thread that has a core already."""
        self._busy = len(self._threads)
        for thread in self._threads:
            thread.left = self._work[0][0]
        for thread in self._threads:
            if thread is not current:
                self._host.wake(thread)

    def fill_caches(self) -> float:
        """Return the seconds that a thread's first piece on a cold core takes in addition."""
        self.worked += self._cold
        return self._cold

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
