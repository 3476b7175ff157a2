"""Cores and memory that this process may use, within the limits of its container.

A process is in a control group (cgroup) of Linux. The limits of this group and of all groups above
it hold. This file does not import torch, because `penstock doctor` uses it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# The names of version 2, and those of version 1.
OF_VERSION_1 = {
    "memory.max": "memory.limit_in_bytes",
    "memory.current": "memory.usage_in_bytes",
}


def cpu_count() -> int:
    """Return the cores this process may use, within its CPU mask and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [_cpu_quota(group) for group in _groups("cpu")]
    return max(1, min([cores or 1, *(quota for quota in quotas if quota is not None)]))


def _cpu_quota(group: Path) -> int | None:
    """Return the cores that a group may use, rounded up; None if it has no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = _read(group / "cpu.max").split()
        else:
            quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        cores = -(-int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such files, or "max"
    return cores if cores > 0 else None  # cgroup v1 uses -1 for no limit


def free_memory() -> int:
    """Return the bytes of RAM that are still free for this process."""
    free = [machine_memory(), *(_free_in(group) for group in _groups("memory"))]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            free.append(max(0, limit - pages * os.sysconf("SC_PAGE_SIZE")))
    except (OSError, ValueError):
        pass  # the file is missing or not in the format of Linux
    return min(amount for amount in free if amount is not None)


def is_memory_limited() -> bool:
    """Whether a container or ulimit gives this process less than the machine's RAM."""
    return machine_memory() < _installed_memory()


def resident_memory() -> int:
    """Return the bytes of RAM that this process holds, shared libraries included; 0 if unknown."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def release_unused() -> None:
    """Give freed memory back to the system. C libraries other than glibc do so by themselves."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def machine_memory() -> int:
    """Return the bytes of RAM of the machine, or the lowest limit of a container or of ulimit."""
    whole = _installed_memory()
    limits = [_memory_limit(group) for group in _groups("memory")]
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        limits.append(own)
    return min([whole, *(limit for limit in limits if limit is not None)])


def _installed_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in(group: Path) -> int | None:
    """Return the bytes that are left to a group; None without a limit."""
    limit = _memory_limit(group)
    if limit is None:
        return None
    try:
        used = int(_read(_file(group, "memory.current")))
        stat = _read(group / "memory.stat").split()
        counts = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
        # The page cache, such as a checkpoint just read, is dropped when memory is needed.
        for files in ("active_file", "inactive_file"):
            # In cgroup v1, total_ includes the child groups.
            used -= counts.get(f"total_{files}", counts.get(files, 0))
    except (OSError, ValueError):
        return None
    return max(limit - used, 0)


def _memory_limit(group: Path) -> int | None:
    """Return the memory limit of a group in bytes; None if it has none ("max")."""
    try:
        return int(_read(_file(group, "memory.max")))
    except (OSError, ValueError):
        return None


def _groups(controller: str) -> list[Path]:
    """Return the folders of this process's group and of the groups above it.

    In a container only the group of the container may be visible, as the root.
    """
    found = [CGROUP, CGROUP / controller]
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return found
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP
        group = root / path.lstrip("/")
        while group != root and root in group.parents:
            found.append(group)
            group = group.parent
    return found


def _file(group: Path, name: str) -> Path:
    """Return a file of cgroup v2, or its counterpart in cgroup v1."""
    path = group / name
    return path if path.exists() else group / OF_VERSION_1[name]


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii")


# Names in /proc/cpuinfo of the instructions that multiply bfloat16, on x86 and on Arm.
BF16_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
