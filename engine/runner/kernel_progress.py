"""The progress of a first start, which compiles the kernels of a CPU."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.device.cache import protect_triton_folder
from engine.device.limits import cpu_count
from engine.memory.model_plan import ModelPlan
from engine.protocol.ready import Progress

if TYPE_CHECKING:
    from engine.kernels.numba.compilers import Kernel
    from engine.kernels.numba.machine_code import KernelStore

# Seconds to compile a kernel on a core of an AMD EPYC (Zen 4), by module or name. The progress
# measures how fast this machine is, so only the ratios count.
SECONDS = {
    "attention": 7.0,
    "causal_conv": 2.5,
    "codes.multiply_kernel": 3.0,
    "codes.round_kernel": 0.6,
    "draw": 7.0,
    "gated": 0.6,
    "linear": 2.0,
    "program": 0.2,
    "recurrence": 2.5,
    "rowwise": 0.8,
    "span_attention.attend_kernel": 3.0,
    "span_attention.pack_kernel": 0.6,
    "store_kv": 0.5,
}
USUAL_SECONDS = 1.0
FIRST_SECONDS = 1.2  # more for the first kernel: Numba prepares itself


class CompileProgress:
    """Reports the kernels that are compiled, and how long all that are left will take.

    `needed` are the kernels that the model is expected to need. Those of `store` need no time.
    """

    def __init__(
        self, store: KernelStore, needed: Iterable[Kernel], report: Callable[[Progress], None]
    ) -> None:
        self._store = store
        missing = [kernel for kernel in needed if not store.has(kernel)]
        self.missing = sorted(missing, key=usual_seconds, reverse=True)
        self._left = set(missing)
        self._report = report
        self._number = 0  # of the last kernel that this process compiles
        self._number_told = 0  # of the last kernel compiled ahead
        self._usual_seconds = FIRST_SECONDS  # of the kernels that are compiled
        self._ends: dict[Kernel, float] = {}  # of kernels compiled ahead, in usual seconds
        self._begin = self._last_end = time.monotonic()

    @property
    def count(self) -> int:
        """The number of kernels that were missing and are compiled now."""
        return self._number + sum(map(self._store.has, self._ends))

    @property
    def ahead_seconds(self) -> float:
        """How long kernels have been compiled ahead, until the last one that was waited for."""
        return self._last_end - self._begin

    def begin(self, kernel: Kernel) -> None:
        """Report that this process will compile `kernel`. The first is the measure for others."""
        self._left.discard(kernel)
        self._ends.pop(kernel, None)
        left = None
        own = usual_seconds(kernel)
        if self._store.compile_seconds:
            slowness = self._store.compile_seconds / self._usual_seconds
            left = slowness * (own + sum(map(usual_seconds, self._left)))
        self._usual_seconds += own
        self._number += 1
        self._tell(self._number, self._number + len(self._left), left)

    def begin_ahead(self, processes: int) -> None:
        """Note that `processes` begin with the missing kernels, the slowest ones first."""
        self._begin = self._last_end = time.monotonic()
        free_at = [FIRST_SECONDS] * processes
        for kernel in self.missing:
            end = heapq.heappop(free_at) + usual_seconds(kernel)
            self._ends[kernel] = end
            heapq.heappush(free_at, end)

    def wait(self) -> None:
        """Report how many kernels are compiled ahead by now, if one more is."""
        done = {kernel for kernel in self._ends if self._store.has(kernel)}
        count, number = len(self._ends), len(done) + 1
        if number == self._number_told:
            return
        self._number_told = number
        left = None
        self._last_end = time.monotonic()
        if done:
            slowness = self.ahead_seconds / max(self._ends[kernel] for kernel in done)
            left = slowness * max(self._ends.values()) - self.ahead_seconds
        self._tell(min(number, count), count, left)

    def _tell(self, number: int, count: int, left: float | None) -> None:
        text = "" if left is None else f", about {max(round(left), 1)} s left"
        stage = f"compiling kernels for this CPU, once: {number} of {count}{text}"
        self._report(Progress(stage, (number - 1) / count))


def usual_seconds(kernel: Kernel) -> float:
    """Return how long it takes to compile a kernel on the machine of SECONDS."""
    name = str(kernel[0])
    module, _, _ = name.partition(".")
    return SECONDS.get(name) or SECONDS.get(module, USUAL_SECONDS)


class CompiledKernels:
    """The kernels for this CPU that a start compiles. Triton's are not counted."""

    def __init__(self, plan: ModelPlan, report: Callable[[Progress], None]) -> None:
        """`report` gets the progress of all kernels that are compiled from now on."""
        self._store: KernelStore | None = None
        self._progress: CompileProgress | None = None
        if plan.kernels == "triton":
            protect_triton_folder()
        if plan.kernels != "numba":
            return
        # Not imported at the top: a machine with a GPU needs no llvmlite.
        from engine.kernels.numba.machine_code import kernel_store
        from engine.runner.needed_kernels import needed_kernels

        self._store = kernel_store()
        needed = needed_kernels(plan)
        if plan.draft is not None and plan.draft.kernels == "numba":
            needed |= needed_kernels(plan.draft)
        self._progress = CompileProgress(self._store, needed, report)
        self._store.compiling = self._progress.begin
        self._store.waiting = self._progress.wait
        cores = max(cpu_count() // plan.ranks.count, 1)
        if processes := self._store.compile_ahead(self._progress.missing, cores):
            self._progress.begin_ahead(processes)

    @property
    def count(self) -> int:
        return 0 if self._progress is None else self._progress.count

    @property
    def seconds(self) -> float:
        """How long they took, by the clock."""
        if self._store is None or self._progress is None:
            return 0.0
        return self._store.compile_seconds + self._progress.ahead_seconds

    @property
    def blocked_seconds(self) -> float:
        """The part of `seconds` in which the start did nothing else."""
        return (
            0.0 if self._store is None else self._store.compile_seconds + self._store.wait_seconds
        )
