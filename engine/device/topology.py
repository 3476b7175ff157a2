"""Which GPU each rank gets, among those that CUDA_VISIBLE_DEVICES leaves visible."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.device.ranks import FLAG, Ranks
from engine.errors import ConfigError

PCI = Path("/sys/bus/pci/devices")
UNKNOWN = -1  # memory node


class Topology(NamedTuple):
    """The visible GPUs: their memory nodes, and the pairs that can write to each other's memory."""

    nodes: tuple[int, ...]  # by GPU; UNKNOWN if the system does not say
    peers: frozenset[tuple[int, int]]  # of two GPUs, the lower number first


def device_of_rank(device: torch.device, ranks: Ranks) -> torch.device:
    """Return this rank's own GPU, or the CPU. Raises ConfigError if there are too few GPUs.

    Every rank finds the same order, because all of them see the same GPUs.
    """
    if ranks.count == 1 or device.type == "cpu":
        return device
    found = torch.cuda.device_count()
    if found < ranks.count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise ConfigError(
            f"{FLAG} {ranks.count} needs {ranks.count} GPUs, one for each process; torch finds "
            f"{found}{limit}. Lower it, or make more GPUs visible."
        )
    number = gpus_of_ranks(visible_topology(found), ranks.count)[ranks.own]
    torch.cuda.set_device(number)
    return torch.device(device.type, number)


def gpus_of_ranks(topology: Topology, count: int) -> list[int]:
    """Return the GPUs of ranks 0, 1, ...: those with the most pairs of peers, and of these the
    ones with the most pairs on one memory node, and of these the first.

    They are in the order of their nodes, in which the ranks have their cores (`cores_of_ranks`).
    """
    nodes, peers = topology

    def quality(gpus: tuple[int, ...]) -> tuple[int, int]:
        pairs = list(combinations(gpus, 2))
        near = [1 for one, other in pairs if nodes[one] == nodes[other] != UNKNOWN]
        return len(peers.intersection(pairs)), len(near)

    best = max(combinations(range(len(nodes)), count), key=quality)
    return sorted(best, key=lambda gpu: (nodes[gpu], gpu))


def visible_topology(count: int) -> Topology:
    """Return the topology of the `count` GPUs that torch sees."""
    peers = frozenset(pair for pair in combinations(range(count), 2) if have_peer_access(pair))
    return Topology(tuple(_memory_node(gpu) for gpu in range(count)), peers)


def have_peer_access(gpus: tuple[int, ...]) -> bool:
    """Whether each of these GPUs can write to the memory of each other."""
    can_access = torch.cuda.can_device_access_peer
    pairs = combinations(gpus, 2)
    return all(can_access(one, other) and can_access(other, one) for one, other in pairs)


def _memory_node(gpu: int) -> int:
    """Return the memory node of a GPU's slot."""
    properties: Any = torch.cuda.get_device_properties(gpu)
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        slot = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
        return int((PCI / slot / "numa_node").read_text(encoding="ascii"))
    except (AttributeError, OSError, ValueError):  # not every torch says where a GPU is
        return UNKNOWN
