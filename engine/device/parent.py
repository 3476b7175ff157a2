"""The end of a process with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make Linux kill this process when the thread that started it ends. See prctl(2).

    Other systems have no such call: a process whose stdin is a pipe of its parent can watch it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
