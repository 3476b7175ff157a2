"""Compiling a kernel, once: for the next start its machine code is kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
from functools import cache
from pathlib import Path

import numba
from llvmlite import binding
from numba import cfunc
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from engine.kernels.cpu.intrinsics import FEATURES

EXACT = {"contract"}  # a product and a sum may be rounded as one, and nothing is reordered


def compiled(body, signature, *shape: int) -> CFunc:
    """`body` for this shape; kept where there is room.

    Under a name of its own for every shape, version of the source and CPU: Numba writes the list of
    what it keeps under a name and the code apart, so of two processes that write at once one may
    leave its list and the other its code. Under these names both are of the same.
    """
    target = f"{numba.__version__} {binding.get_host_cpu_name()} {FEATURES}".encode()
    digest = hashlib.sha256(_source() + target).hexdigest()[:16]
    body.__qualname__ = "_".join([body.__name__, *map(str, map(int, shape)), digest])
    options = {"fastmath": EXACT, "error_model": "numpy"}
    try:
        return cfunc(signature, cache=True, **options)(body)
    except (RuntimeError, OSError):  # no place for it, or a full one
        pass
    except Exception:  # a crash left half of it: empty the list, so that it is written anew
        with contextlib.suppress(OSError):
            FunctionCache(body).flush()
    return cfunc(signature, **options)(body)


@cache
def _source() -> bytes:
    return b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
