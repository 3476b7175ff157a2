"""The progress of a first start, which compiles the kernels of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.device.cache import protect_triton_folder
from engine.memory.model_plan import ModelPlan
from engine.protocol.ready import Progress

if TYPE_CHECKING:
    from engine.kernels.numba.machine_code import Kernel, KernelStore

# Seconds to compile a kernel on a core of an AMD EPYC (Zen 4), by module or name. The progress
# measures how fast this machine is, so only the ratios count.
SECONDS = {
    "attention": 7.0,
    "causal_conv": 2.5,
    "codes.multiply_kernel": 3.0,
    "codes.round_kernel": 0.6,
    "gated": 0.6,
    "linear": 2.0,
    "program": 0.2,
    "recurrence": 2.5,
    "rowwise": 0.8,
    "store_kv": 0.5,
}
USUAL_SECONDS = 1.0
FIRST_SECONDS = 1.2  # more for the first kernel: Numba prepares itself


class CompileProgress:
    """Reports each kernel that is compiled, and how long all that are left will take.

    `needed` are the kernels that the model is expected to need. Those of `store` need no time.
    """

    def __init__(
        self, store: KernelStore, needed: Iterable[Kernel], report: Callable[[Progress], None]
    ) -> None:
        self._store = store
        self._left = {kernel for kernel in needed if not store.has(kernel)}
        self._report = report
        self._number = 0
        self._usual_seconds = FIRST_SECONDS  # of the kernels that are compiled

    def begin(self, kernel: Kernel) -> None:
        """Report that `kernel` will be compiled. The first one is the measure for the others."""
        self._left.discard(kernel)
        left = ""
        own = usual_seconds(kernel)
        if self._store.compile_seconds:
            slowness = self._store.compile_seconds / self._usual_seconds
            seconds = slowness * (own + sum(map(usual_seconds, self._left)))
            left = f", about {max(round(seconds), 1)} s left"
        self._usual_seconds += own
        self._number += 1
        count = self._number + len(self._left)
        stage = f"compiling kernels for this CPU, once: {self._number} of {count}{left}"
        self._report(Progress(stage, (self._number - 1) / count))


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
        self._store.compiling = CompileProgress(self._store, needed, report).begin

    @property
    def count(self) -> int:
        return 0 if self._store is None else self._store.compiled

    @property
    def seconds(self) -> float:
        return 0.0 if self._store is None else self._store.compile_seconds
