"""What this process may use of its machine, within its container's limits: cores and memory.

Torch-free, as `penstock doctor` reads them, too.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_count() -> int:
    """Cores this process may use; a container's mask counts, its quota too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = (CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores or 1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cores or 1


def free_memory() -> int:
    """Bytes of RAM that may still be taken."""
    free = machine_memory()
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
        if (limit := _container_limit()) is not None:
            used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
            stat = (CGROUP / "memory.stat").read_text(encoding="ascii").split()
            counts = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
            # Files in memory, as the checkpoint just read, are dropped when somebody needs it.
            used -= counts["active_file"] + counts["inactive_file"]
            free = min(free, max(limit - used, 0))
    except (OSError, ValueError, KeyError):
        pass  # no such file, or not what Linux writes there
    return free


def machine_memory() -> int:
    """Bytes of RAM this process could ever have: the machine's, within the container's limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_limit()
    return whole if limit is None else min(whole, limit)


def _container_limit() -> int | None:
    """Bytes; None without a container, or without a limit ("max")."""
    try:
        return int((CGROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
