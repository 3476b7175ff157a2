"""Run kernels on the OpenMP threads that torch computes with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

Parallel = Callable[[int, int, int, int], None]  # function, its argument, threads, flags


@cache
def parallel() -> Parallel | None:
    """Return GOMP_parallel of the OpenMP runtime that torch uses, or None if there is none.

    torch's threads spin for a while when they are idle. Threads of Numba's own would compete with
    them for the cores.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        run = ctypes.CDLL(str(library)).GOMP_parallel  # found in the library's dependencies
    except (OSError, AttributeError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run


def in_threads(kernel: int, call: ctypes.Structure, *, alone: bool = False) -> None:
    """Run the kernel at this address on all threads until every task is taken.

    With `alone` it runs on the caller's thread.

    It never runs on some of the threads: OpenMP would end those that a smaller team leaves out, and
    would have to start new ones for the next kernel.
    """
    run, counter = parallel(), ctypes.c_int64(0)
    assert run is not None
    call.counter = ctypes.addressof(counter)
    threads = 1 if alone else torch.get_num_threads()
    run(kernel, ctypes.addressof(call), threads, 0)
