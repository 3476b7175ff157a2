"""Cores and memory within the limits of control groups and of ulimit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.device import limits
from engine.device.limits import cpu_count, free_memory, machine_memory

MIB = 1 << 20


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the control groups; this process is in /a.slice/b.service."""
    root = tmp_path / "cgroup"
    own = tmp_path / "own"
    own.write_text("0::/a.slice/b.service\n", encoding="ascii")
    monkeypatch.setattr(limits, "CGROUP", root)
    monkeypatch.setattr(limits, "OWN_GROUPS", own)
    write(root, {"a.slice/b.service/cgroup.type": "domain"})
    return root


@pytest.mark.parametrize("group", ["a.slice/b.service", "a.slice", "."])
def test_limits_of_the_own_group_and_of_those_above_hold(groups: Path, group: str) -> None:
    """Such as those of MemoryMax= and CPUQuota= of systemd, and of Slurm's jobs."""
    files = {
        "memory.max": str(300 * MIB),
        "memory.current": str(200 * MIB),
        "cpu.max": "50000 100000",
    }
    stat = f"active_file {20 * MIB}\ninactive_file {30 * MIB}"
    write(groups / group, {**files, "memory.stat": stat})
    assert machine_memory() == 300 * MIB
    assert free_memory() == 150 * MIB
    assert cpu_count() == 1


def test_lowest_limit_holds(groups: Path) -> None:
    write(groups / "a.slice", {"memory.max": str(100 * MIB)})
    write(groups / "a.slice/b.service", {"memory.max": str(300 * MIB)})
    assert machine_memory() == 100 * MIB
    write(groups / "other.slice", {"memory.max": "1"})
    assert machine_memory() == 100 * MIB


def test_groups_of_version_1_are_read(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("7:memory:/job\n3:cpu,cpuacct:/job\n", encoding="ascii")
    stat = "total_active_file 0\ntotal_inactive_file 0"
    write(
        groups,
        {
            "memory/job/memory.limit_in_bytes": str(300 * MIB),
            "memory/job/memory.usage_in_bytes": str(100 * MIB),
            "memory/job/memory.stat": stat,
            "cpu/job/cpu.cfs_quota_us": "100000",
            "cpu/job/cpu.cfs_period_us": "100000",
        },
    )
    assert (machine_memory(), free_memory(), cpu_count()) == (300 * MIB, 200 * MIB, 1)


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/../../elsewhere\n", "0::/gone\n", "garbage"])
def test_group_that_is_not_visible_leaves_the_root(groups: Path, tmp_path: Path, own: str) -> None:
    """In a container, the path may be the host's."""
    (tmp_path / "own").write_text(own, encoding="ascii")
    write(groups, {"memory.max": str(300 * MIB)})
    assert machine_memory() == 300 * MIB


def test_ulimit_is_a_limit() -> None:
    code = (
        "import resource\n"
        "from engine.device.limits import *\n"
        "whole = machine_memory()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
        "print(machine_memory(), free_memory() < 1 << 29, whole > 1 << 29)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(1 << 29), "True", "True"]
