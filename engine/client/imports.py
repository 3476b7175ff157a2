"""Importing large libraries at the start of a process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules without garbage collection, and exempt their objects from later ones.

    Modules live until the process ends. Visiting torch's takes a third of its import, and again
    as long when the process exits.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
