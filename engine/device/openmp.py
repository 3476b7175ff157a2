"""Run kernels on the OpenMP threads that torch computes with."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
Parallel = Callable[[int, int, int, int], None]  # function, its argument, threads, flags
Record = Callable[[int, ctypes.Structure, Any], None]  # kernel, its arguments, constants


@cache
def parallel() -> Parallel | None:
    """Return GOMP_parallel of the OpenMP runtime that torch uses, or None if there is none.

    torch's threads spin for a while when they are idle. Threads of Numba's own would compete with
    them for the cores.
    """
    try:
        run = ctypes.CDLL(str(LIBRARY)).GOMP_parallel  # found in the library's dependencies
    except (OSError, AttributeError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run


def in_threads(
    kernel: int, call: ctypes.Structure, *, alone: bool = False, constants: Any = None
) -> None:
    """Run the kernel at this address on all threads until every task is taken.

    With `alone` it runs on the caller's thread. `constants` is memory of the arguments that Python
    has filled for this call. A recorded call needs it again.

    It never runs on some of the threads: OpenMP would end those that a smaller team leaves out, and
    would have to start new ones for the next kernel.
    """
    run, counter = parallel(), ctypes.c_int64(0)
    assert run is not None
    for record in _records:
        record(kernel, call, constants)
    call.counter = ctypes.addressof(counter)
    threads = 1 if alone else torch.get_num_threads()
    run(kernel, ctypes.addressof(call), threads, 0)


@contextlib.contextmanager
def recorded(record: Record) -> Iterator[None]:
    """Call `record` with the address, arguments and constants of each kernel before it runs."""
    _records.append(record)
    try:
        yield
    finally:
        _records.remove(record)


def team_size_address() -> int:
    """Return the address of OpenMP's function that returns the number of running threads."""
    function = ctypes.CDLL(str(LIBRARY)).omp_get_num_threads
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_records: list[Record] = []
