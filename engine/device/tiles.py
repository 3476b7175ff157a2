"""Permission to use tiles, the registers of AMX, in kernels of our own."""

from __future__ import annotations

import ctypes
import os
import platform

from engine.device.facts import cpu_has_amx, onednn_may_use

# Linux gives a process the large state of tiles only if it asks (Documentation/arch/x86/xstate).
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
SYS_ARCH_PRCTL = 158  # on x86-64


def tiles_refused() -> str | None:
    """Return why this process may not use tiles, or None after it got the permission.

    The permission is for all threads, also for those that run already. `ONEDNN_MAX_CPU_ISA` is
    read as the user's wish: it limits our kernels like oneDNN's.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not cpu_has_amx():
        return "the CPU has no AMX"
    if not onednn_may_use("AMX"):
        return "ONEDNN_MAX_CPU_ISA forbids it"
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA):
        return f"Linux refuses the permission ({os.strerror(ctypes.get_errno())})"
    return None
