"""The memory nodes (NUMA) of the machine: which cores are near which memory.

This file does not import torch: ranks are bound before they do.
"""

from __future__ import annotations

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def cores_of_ranks(count: int) -> list[set[int]]:
    """Return the cores on which each of `count` ranks should run.

    If the cores of this process are near several memory nodes, and these divide the ranks evenly,
    each rank gets the cores of one node. Otherwise each rank may use all of them.
    """
    allowed = os.sched_getaffinity(0)
    near = [cores & allowed for cores in _nodes()]
    near = [cores for cores in near if cores]
    if len(near) < 2 or count % len(near):
        return [allowed] * count
    return [near[rank * len(near) // count] for rank in range(count)]


def _nodes() -> list[set[int]]:
    """Return the cores of each node, in the order of their numbers; empty if unknown."""
    try:
        files = {int(file.parent.name[4:]): file for file in NODES.glob("node[0-9]*/cpulist")}
        return [_cores(files[number].read_text(encoding="ascii")) for number in sorted(files)]
    except (OSError, ValueError):
        return []


def _cores(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8-11"."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
