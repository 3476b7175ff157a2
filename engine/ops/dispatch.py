"""Which code computes an op: a Triton kernel on a CUDA device, torch everywhere else.

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


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None
