"""Select the code that computes an op: a Triton kernel on CUDA, a Numba kernel on CPU, or torch.

Triton kernels are used on a CUDA device. Numba kernels are used on a CPU if they are enabled.

Kernels are imported inside the functions that call them, never at the top of a file. So a machine
without a GPU does not need triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch

_everywhere: ContextVar[bool] = ContextVar("kernels_everywhere", default=False)
_compiled: ContextVar[bool] = ContextVar("compiled_kernels", default=False)


def kernels_for(x: torch.Tensor) -> bool:
    """Return whether Triton kernels compute ops on `x`, not their torch references."""
    return (x.is_cuda and _triton_is_installed()) or _everywhere.get()


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Use Triton kernels on the CPU too, where only Triton's interpreter runs them. For tests."""
    token = _everywhere.set(True)
    try:
        yield
    finally:
        _everywhere.reset(token)


def compiled_for(x: torch.Tensor) -> bool:
    """Return whether Numba kernels compute ops on `x`."""
    return _compiled.get() and x.device.type == "cpu"


@contextmanager
def compiled_kernels(wanted: bool) -> Iterator[None]:
    """Enable or disable Numba kernels on a CPU; a runner does this while it computes."""
    token = _compiled.set(wanted)
    try:
        yield
    finally:
        _compiled.reset(token)


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None
