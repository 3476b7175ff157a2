"""Which code computes an op: a Triton kernel on a CUDA device, torch everywhere else; on a CPU one
that Numba compiled, where that was asked for.

Kernels are imported where they are called, never at the top of a file: a machine without a GPU
needs no triton.
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
    """Whether kernels compute on `x`, rather than their torch references."""
    return (x.is_cuda and _triton_is_installed()) or _everywhere.get()


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Kernels on the CPU, too: only Triton's interpreter can run them there. For tests."""
    token = _everywhere.set(True)
    try:
        yield
    finally:
        _everywhere.reset(token)


def compiled_for(x: torch.Tensor) -> bool:
    """Whether kernels that Numba compiled compute on `x`."""
    return _compiled.get() and x.device.type == "cpu"


@contextmanager
def compiled_kernels(wanted: bool) -> Iterator[None]:
    """Numba's kernels on a CPU, or not: what a runner was asked for, while it computes."""
    token = _compiled.set(wanted)
    try:
        yield
    finally:
        _compiled.reset(token)


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None
