"""CoreWaits: how long the engine's threads wait for a core in each step, by Linux's own count.

The second number of a thread's `schedstat` is the time in which it was ready to run and had no core
(Linux, Documentation/scheduler/sched-stats.rst). A thread that sleeps or spins does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from engine.device.openmp_wait import Times, thread_times
from engine.protocol.watch import StepWaits

CHANNEL = "ZMQbg"  # libzmq's names of its threads begin so; no step waits for them


class CoreWaits:
    """Reads the threads' times at the end of each step, from its creation on.

    `waited_ns` is what the main thread had waited when a client sent for this, or -1.
    """

    def __init__(
        self,
        waited_ns: int = -1,
        read: Callable[[], Times] = thread_times,
        name_of: Callable[[str], str] | None = None,
    ) -> None:
        self._read, self._name_of = read, name_of or thread_name
        self._names: dict[str, str] = {}  # of the threads that have waited
        self._times = read()
        self._idle = 0.0
        main, now = str(os.getpid()), self._times
        if waited_ns >= 0 and main in now:
            self._idle = (now[main][1] - waited_ns) / 1e9

    def arrived(self) -> None:
        """Note that a request has arrived: the waits up to now are not those of a step."""
        self._idle += self._since()[0]

    def of_step(self, step: int) -> StepWaits:
        """Return the waits since the last step, or since the creation."""
        idle, self._idle = self._idle, 0.0
        return StepWaits(step, idle, *self._since())

    def _since(self) -> tuple[float, float]:
        """Return the longest wait since the last reading, and the sum of all, in seconds."""
        before, self._times = self._times, self._read()
        queued = []
        for thread, (_, waited) in self._times.items():
            new = waited - before.get(thread, (0, 0))[1]
            if new and not self._name(thread).startswith(CHANNEL):
                queued.append(new)
        return max(queued, default=0) / 1e9, sum(queued) / 1e9

    def _name(self, thread: str) -> str:
        if thread not in self._names:
            self._names[thread] = self._name_of(thread)
        return self._names[thread]


def thread_name(thread: str) -> str:
    """Return the name of a thread of this process; empty if it has ended."""
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:
        return ""
