"""The command that runs one of our modules in a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def python_module(name: str) -> list[str]:
    """Return the command that runs one of our modules.

    It passes -P, without which Python would look for modules in the current folder first and run a
    random.py there. The exception is our own source tree, which need not be installed.
    """
    at_home = False
    with contextlib.suppress(OSError):  # the current folder is unreadable or deleted
        at_home = Path(__file__).parents[2].samefile(os.curdir)
    return [sys.executable, *([] if at_home else ["-P"]), "-m", name]
