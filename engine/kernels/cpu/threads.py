"""The threads that kernels run on: those that torch computes with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

Parallel = Callable[[int, int, int, int], None]  # function, its argument, threads, flags


@cache
def parallel() -> Parallel | None:
    """GOMP_parallel of the OpenMP torch itself runs on, or None.

    The threads torch computes with spin a while when they have nothing to do; threads of Numba's
    own would compete with them for the cores.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        run = ctypes.CDLL(str(library)).GOMP_parallel  # found in what the library needs
    except (OSError, AttributeError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run


def in_threads(kernel, call: ctypes.Structure, *, alone: bool = False) -> None:
    """In all threads, until they have taken every task off the counter, or in the caller's `alone`.

    Never in some: OpenMP ends the threads that a smaller team leaves out, and starts new ones.
    """
    run, counter = parallel(), ctypes.c_int64(0)
    assert run is not None
    call.counter = ctypes.addressof(counter)
    threads = 1 if alone else torch.get_num_threads()
    run(kernel.address, ctypes.addressof(call), threads, 0)
