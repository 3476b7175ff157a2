"""Compiling a kernel, once: for the next start its machine code is kept on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from numba import cfunc
from numba.core.ccallback import CFunc

EXACT = {"contract"}  # a product and a sum may be rounded as one, and nothing is reordered
SOURCES = sorted(Path(__file__).parent.glob("*.py"))


def compiled(body, signature, *shape: int) -> CFunc:
    """`body` for this shape; kept where there is room.

    Under a name of its own for every shape and version of the source: Numba writes the list of what
    it keeps under a name and the code apart, so of two processes that write at once one may leave
    its list and the other its code. Under these names both are of the same.
    """
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in SOURCES)).hexdigest()[:16]
    body.__qualname__ = "_".join([body.__name__, *map(str, map(int, shape)), digest])
    options = {"fastmath": EXACT, "error_model": "numpy"}
    try:
        return cfunc(signature, cache=True, **options)(body)
    except (RuntimeError, OSError):  # no place for it, or a full one
        return cfunc(signature, **options)(body)
