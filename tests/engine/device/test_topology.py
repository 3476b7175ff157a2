"""Ranks get the GPUs that reach each other, on made-up machines."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.device import topology
from engine.device.ranks import Ranks
from engine.device.topology import Topology, device_of_rank, gpus_of_ranks, visible_topology
from engine.errors import ConfigError

CUDA = torch.device("cuda")


def pairs(*groups: str) -> frozenset[tuple[int, int]]:
    """The pairs of GPUs within each group of digits."""
    return frozenset(pair for group in groups for pair in combinations(map(int, group), 2))


@pytest.mark.parametrize(
    ("nodes", "peers", "count", "due"),
    [
        ((-1,) * 2, pairs(), 2, [0, 1]),
        ((0,) * 8, pairs("01234567"), 8, list(range(8))),
        ((0,) * 8, pairs("01234567"), 4, [0, 1, 2, 3]),
        ((0,) * 4, pairs("03", "12"), 2, [0, 3]),
        ((0,) * 4, pairs("13"), 2, [1, 3]),
        ((0,) * 6, pairs("024", "135"), 3, [0, 2, 4]),
        ((0, 1, 1, 0), pairs("0123"), 2, [0, 3]),
        ((1, 0, 1, 0), pairs("0123"), 4, [1, 3, 0, 2]),
        ((0, 1, 1, 0), pairs("02"), 2, [0, 2]),
        ((0, 0, 0, 0), pairs(), 3, [0, 1, 2]),
    ],
    ids=[
        *("unknown machine", "all of eight", "half of eight", "bridges", "one bridge"),
        *("two switches", "one node", "nodes in order", "peers before nodes", "no peers"),
    ],
)
def test_ranks_get_gpus_that_reach_each_other(
    nodes: tuple[int, ...], peers: frozenset[tuple[int, int]], count: int, due: list[int]
) -> None:
    assert gpus_of_ranks(Topology(nodes, peers), count) == due


class Machine:
    """Stands in for torch.cuda: four GPUs, in which 0 and 2 are on one node, 1 and 3 on another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.chosen: list[int] = []
        self.one_way: set[tuple[int, int]] = set()
        for gpu in range(4):
            slot = folder / f"0000:{gpu + 16:02x}:00.0"
            slot.mkdir()
            (slot / "numa_node").write_text(f"{gpu % 2}\n")
        monkeypatch.setattr(topology, "PCI", folder)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "set_device", self.chosen.append)
        monkeypatch.setattr(
            torch.cuda, "can_device_access_peer", lambda *pair: pair not in self.one_way
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)

    def properties(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=gpu + 16, pci_device_id=0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_each_rank_chooses_its_own_gpu_and_no_other(machine: Machine) -> None:
    devices = [device_of_rank(CUDA, Ranks(own, 2)) for own in range(2)]
    assert devices == [torch.device("cuda", 0), torch.device("cuda", 2)]
    assert machine.chosen == [0, 2]


def test_all_gpus_are_in_the_order_of_their_nodes(machine: Machine) -> None:
    found = [device_of_rank(CUDA, Ranks(own, 4)).index for own in range(4)]
    assert found == [0, 2, 1, 3]


def test_pair_that_reaches_one_way_only_is_no_pair(machine: Machine) -> None:
    machine.one_way = {(2, 0)}
    assert visible_topology(4) == Topology((0, 1, 0, 1), pairs("0123") - {(0, 2)})


def test_gpu_of_unknown_slot_has_no_node(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every version of torch says where a GPU is."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace())
    assert visible_topology(4).nodes == (-1,) * 4


def test_too_few_gpus_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"needs 8 GPUs, one for each process; torch finds 4\. "):
        device_of_rank(CUDA, Ranks(2, 8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(ConfigError, match=r"finds 4 \(CUDA_VISIBLE_DEVICES is '0,1,2,3'\)\. Lower"):
        device_of_rank(CUDA, Ranks(2, 8))
    assert machine.chosen == []


def test_cpu_and_single_rank_keep_their_device(machine: Machine) -> None:
    cpu = torch.device("cpu")
    assert device_of_rank(cpu, Ranks(1, 2)) == cpu
    assert device_of_rank(CUDA, Ranks()) == CUDA
    assert machine.chosen == []
