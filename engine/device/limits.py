"""Cores and memory that this process may use, within the limits of its container.

It does not import torch, because `penstock doctor` uses it too.
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
    """Return the cores this process may use, within its CPU mask and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = _cpu_quota()
    except (OSError, ValueError):
        return cores or 1
    return max(1, min(cores or 1, -(-quota // period)))


def _cpu_quota() -> tuple[int, int]:
    """Return (quota, period): microseconds of processor time allowed in each period.

    Raises OSError or ValueError if there is no limit.
    """
    if (CGROUP / "cpu.max").exists():
        quota, period = _container("cpu.max").split()
    else:
        quota, period = (_container(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota.startswith("-"):
        raise ValueError("cgroup v1 uses -1 for no limit")
    return int(quota), int(period)


def free_memory() -> int:
    """Return the bytes of RAM that are still free for this process."""
    free = machine_memory()
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
        if (limit := _container_limit()) is not None:
            used = int(_container("memory.current"))
            stat = _container("memory.stat").split()
            counts = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
            # The page cache, such as a checkpoint just read, is dropped when memory is needed.
            for files in ("active_file", "inactive_file"):
                # In cgroup v1, total_ includes the child groups.
                used -= counts.get(f"total_{files}", counts[files])
            free = min(free, max(limit - used, 0))
    except (OSError, ValueError, KeyError):
        pass  # the file is missing or not in the format of Linux
    return free


def machine_memory() -> int:
    """Return the bytes of RAM of the machine, or the container's limit if that is lower."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_limit()
    return whole if limit is None else min(whole, limit)


def _container_limit() -> int | None:
    """Return the memory limit in bytes; None without a container or without a limit ("max")."""
    try:
        return int(_container("memory.max"))
    except (OSError, ValueError):
        return None


def _container(name: str) -> str:
    """Return the text of a cgroup v2 file of this process, or of its cgroup v1 counterpart."""
    path = CGROUP / name
    return (path if path.exists() else CGROUP / OF_VERSION_1.get(name, name)).read_text(
        encoding="ascii"
    )


# Names in /proc/cpuinfo of the instructions that multiply bfloat16, on x86 and on Arm.
BF16_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
