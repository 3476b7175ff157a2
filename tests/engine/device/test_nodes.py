"""Ranks are spread over the memory nodes of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.device import nodes
from engine.device.nodes import cores_of_ranks

TWO = {"node0": "0-1,4-5\n", "node1": "2-3,6-7\n", "node10": "\n"}  # the last one has no cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, cores in TWO.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    monkeypatch.setattr(nodes, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return monkeypatch


def test_each_rank_gets_the_cores_of_a_node(machine: pytest.MonkeyPatch) -> None:
    first, second = {0, 1, 4, 5}, {2, 3, 6, 7}
    assert cores_of_ranks(2) == [first, second]
    assert cores_of_ranks(4) == [first, first, second, second]


def test_ranks_that_nodes_do_not_divide_may_use_all_cores(machine: pytest.MonkeyPatch) -> None:
    assert cores_of_ranks(3) == [set(range(8))] * 3


def test_cores_outside_the_mask_are_not_used(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4})
    assert cores_of_ranks(2) == [{1, 4}, {3}]
    machine.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert cores_of_ranks(2) == [{0, 1}, {0, 1}]


def test_machine_without_nodes_binds_nothing(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(nodes, "NODES", tmp_path / "missing")
    assert cores_of_ranks(2) == [set(range(8))] * 2
