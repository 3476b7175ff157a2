"""What this process may use of its machine, within its container's limits: cores and memory.

Torch-free, as `penstock doctor` reads them, too.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OF_VERSION_1 = {
    "memory.max": "memory/memory.limit_in_bytes",
    "memory.current": "memory/memory.usage_in_bytes",
    "memory.stat": "memory/memory.stat",
}


def cpu_count() -> int:
    """Cores this process may use; a container's mask counts, its quota too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = _cpu_quota()
    except (OSError, ValueError):
        return cores or 1
    return max(1, min(cores or 1, -(-quota // period)))


def _cpu_quota() -> tuple[int, int]:
    """Microseconds of processor time in each so many; raises OSError or ValueError for no limit."""
    if (CGROUP / "cpu.max").exists():
        quota, period = _container("cpu.max").split()
    else:
        quota, period = (_container(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota.startswith("-"):
        raise ValueError("version 1 has -1 for no limit")
    return int(quota), int(period)


def free_memory() -> int:
    """Bytes of RAM that may still be taken."""
    free = machine_memory()
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
        if (limit := _container_limit()) is not None:
            used = int(_container("memory.current"))
            stat = _container("memory.stat").split()
            counts = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
            # Files in memory, as the checkpoint just read, are dropped when somebody needs it.
            for files in ("active_file", "inactive_file"):
                used -= counts.get(f"total_{files}", counts[files])  # of version 1, with children
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
        return int(_container("memory.max"))
    except (OSError, ValueError):
        return None


def _container(name: str) -> str:
    """What a file of this process's control group says, or the one that version 1 had for it."""
    path = CGROUP / name
    return (path if path.exists() else CGROUP / OF_VERSION_1.get(name, name)).read_text(
        encoding="ascii"
    )
