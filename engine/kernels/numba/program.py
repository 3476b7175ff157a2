"""A recorded sequence of kernels, which runs again in one parallel region.

OpenMP starts and ends a region for every kernel that is launched from Python. In a program the
threads stay in one region and wait for each other between kernels, which takes less than a
microsecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.device.openmp import in_threads, team_size_address
from engine.kernels.numba.call import CACHE_LINE, LAUNCH, ProgramCall
from engine.kernels.numba.machine_code import kernel_store


class Launch(NamedTuple):
    """A kernel by its address, and its own copy of the arguments."""

    kernel: int
    call: ctypes.Structure


class Program:
    """Kernels with their arguments. The memory that these point to must outlive the program."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._calls = [launch.call for launch in launches]  # the array holds only addresses
        # The counter of each launch, in a cache line of its own.
        self._counters = np.zeros((len(launches), CACHE_LINE // 8), dtype=np.int64)
        pairs = []
        for launch, counter in zip(launches, self._counters, strict=True):
            launch.call.counter = counter.ctypes.data
            pairs.append((launch.kernel, ctypes.addressof(launch.call)))
        self._launches = np.array(pairs, dtype=LAUNCH)
        self._kernel = load_program_kernel()
        self._call = ProgramCall(
            launches=self._launches.ctypes.data,
            team_size=team_size_address(),
        )

    def run(self, first: int, end: int) -> None:
        """Run the launches [first, end)."""
        self._counters[first:end, 0] = 0
        self._call.first = first
        self._call.end = end
        in_threads(self._kernel, self._call)


def load_program_kernel() -> int:
    """Return the address of the kernel that runs programs. The first call may compile it."""
    return kernel_store().address("program.program_kernel")


def copy_of(kernel: int, call: ctypes.Structure) -> Launch:
    """Return the launch with its own copy of the arguments."""
    return Launch(kernel, type(call).from_buffer_copy(call))
