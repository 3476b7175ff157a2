"""Compile kernels and keep their machine code on disk for the next start."""

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

from engine.kernels.numba.cpu import cpu_features

EXACT = {"contract"}  # a product and a sum may fuse (one rounding); nothing is reordered


def compiled(body, signature, *shape: int) -> CFunc:
    """Compile `body` for this shape and cache it on disk if there is room.

    The cached name is unique for every shape, version of the source and CPU. Numba writes the index
    of a name and its code separately. If two processes write at once, the index may come from one
    and the code from the other. Under a unique name, both are the same.
    """
    target = f"{numba.__version__} {binding.get_host_cpu_name()} {cpu_features()}".encode()
    digest = hashlib.sha256(_source() + target).hexdigest()[:16]
    body.__qualname__ = "_".join([body.__name__, *map(str, map(int, shape)), digest])
    options = {"fastmath": EXACT, "error_model": "numpy"}
    try:
        return cfunc(signature, cache=True, **options)(body)
    except (RuntimeError, OSError):  # no cache folder, or a full disk
        pass
    except Exception:  # a crash left an incomplete entry: clear the index, so that it is rewritten
        with contextlib.suppress(OSError):
            FunctionCache(body).flush()
    return cfunc(signature, **options)(body)


@cache
def _source() -> bytes:
    return b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
