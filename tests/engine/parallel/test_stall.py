"""A stall is judged by what ranks do, and by their CPU time, with made-up processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.device.board import RANK_BYTES, Board
from engine.parallel import stall
from engine.parallel.stall import STALL_S, STOPPED_S, TICK_S, StallWatch

LOOKS = int(STALL_S / TICK_S)  # in which nothing happens
STOPPED_LOOKS = int(STOPPED_S / TICK_S)


class Machine:
    """Three ranks whose CPU time and state a test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = folder / "board"
        path.write_bytes(bytes(3 * RANK_BYTES))
        self.boards = [Board(own, 3, str(path)) for own in range(3)]
        self.used = [0.0, 0.0, 0.0]
        self.states = ["S", "S", "S"]
        monkeypatch.setattr(stall, "_cpu_seconds", lambda pid: self.used[pid])
        monkeypatch.setattr(stall, "_state", lambda pid: self.states[pid])
        self.watch = StallWatch(self.boards[0], [0, 1, 2])

    def look(self, times: int) -> str | None:
        """Return the first report of some looks, if there is one."""
        reports = [self.watch.look() for _ in range(times)]
        return next(filter(None, reports), None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_ranks_that_all_wait_have_stalled_after_a_minute(machine: Machine) -> None:
    for board in machine.boards:
        board.wait()
    assert machine.look(LOOKS) is None
    assert machine.look(1) == (
        "The processes of the model have stalled for 60 s: they wait for each other, or for a GPU."
    )


def test_ranks_that_use_no_cpu_time_are_named(machine: Machine) -> None:
    machine.boards[0].wait()
    machine.boards[1].compute()
    machine.boards[2].compute()
    report = machine.look(LOOKS + 1)
    assert report is not None
    assert report.endswith("ranks 1, 2 are waiting for something else than a rank.")


def test_rank_that_is_stopped_is_named_before_others(machine: Machine) -> None:
    for board in machine.boards:
        board.compute()
    machine.states[2] = "T"
    assert machine.look(STOPPED_LOOKS) is None
    report = machine.look(1)
    assert report is not None
    assert report.endswith("rank 2 is stopped by a signal.")


def test_rank_that_computes_moves_while_it_uses_cpu_time(machine: Machine) -> None:
    machine.boards[0].wait()
    machine.boards[1].compute()
    for _ in range(4 * LOOKS):
        machine.used[1] += 0.02
        assert machine.look(1) is None
    assert machine.look(LOOKS) is not None


def test_rank_that_waits_does_not_move_by_cpu_time(machine: Machine) -> None:
    for board in machine.boards:
        board.wait()
    machine.look(1)
    for _ in range(LOOKS - 1):
        machine.used[0] += 0.5
        assert machine.look(1) is None
    assert machine.look(1) is not None


def test_end_of_a_wait_begins_a_new_count(machine: Machine) -> None:
    for board in machine.boards:
        board.wait()
    assert machine.look(LOOKS) is None
    machine.boards[2].compute()
    assert machine.look(LOOKS) is None
    assert machine.look(1) is not None


def test_ranks_may_rest_for_as_long_as_they_like(machine: Machine) -> None:
    machine.boards[0].compute()
    machine.boards[0].rest()
    assert machine.look(4 * LOOKS) is None
