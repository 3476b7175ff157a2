"""Models of what programs on GPUs agree on, in all interleavings of three of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.device_protocols import grid_barrier, last_arriver, two_slot_flags
from tests.support.interleavings import (
    Add,
    Await,
    Boundary,
    Exploration,
    Explorer,
    Load,
    Program,
    Store,
)

PROTOCOLS = {
    "grid barrier": grid_barrier,
    "last arriver": last_arriver,
    "two-slot flags": two_slot_flags,
}
BUGS = [
    ("grid barrier", "write after arrival", "read step -1"),
    ("grid barrier", "arrival without release", "read step"),
    ("grid barrier", "wait without acquire", "read step"),
    ("grid barrier", "target without epoch", "phase 0 of step 1 read step 0"),
    ("grid barrier", "reset too early", "all programs wait"),
    ("last arriver", "counts before it writes", "totals"),
    ("last arriver", "counts without release", "totals"),
    ("last arriver", "adds in order of arrival", "totals"),
    ("last arriver", "reset too early", "totals"),
    ("last arriver", "no reset", "counter 6"),
    ("two-slot flags", "flag before data", "sum 1 read 0"),
    ("two-slot flags", "flag without release", "read"),
    ("two-slot flags", "wait without acquire", "read"),
    ("two-slot flags", "read before flag", "sum 1 read 0"),
    ("two-slot flags", "slot reused", "sum 1 read 2"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.variants(1)
def test_protocol_is_right_in_all_interleavings(protocol: str) -> None:
    explored = PROTOCOLS[protocol]()
    assert explored.fault is None
    assert explored.states > 500, "programs took turns only"


@pytest.mark.parametrize(("protocol", "planted", "fault"), BUGS)
def test_planted_bug_is_found(protocol: str, planted: str, fault: str) -> None:
    found = PROTOCOLS[protocol](planted).fault
    assert found is not None
    assert fault in found


# ---- the explorer itself -------------------------------------------------------------------------


def outcomes(
    *programs: Callable[[], Program], places: tuple[str, ...] = ("x", "y", "a", "b")
) -> set[tuple[int, ...]]:
    """Return the values that the places may have in the end."""
    found: set[tuple[int, ...]] = set()

    def note(memory: dict[str, int]) -> str | None:
        found.add(tuple(memory[place] for place in places[2:]))
        return None

    explored = Explorer(programs, dict.fromkeys(places, 0)).explore(note)
    assert explored.fault is None
    return found


@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("acquires", [True, False])
def test_data_may_be_missing_behind_a_flag_without_release_and_acquire(
    releases: bool, acquires: bool
) -> None:
    """The litmus test "message passing"."""

    def writer() -> Program:
        yield Store("x", 1)
        yield Store("y", 1, releases)

    def reader() -> Program:
        flag = yield Load("y", acquires)
        data = yield Load("x")
        yield Store("a", flag)
        yield Store("b", data)

    due = {(0, 0), (0, 1), (1, 1)}
    assert outcomes(writer, reader) == (due if releases and acquires else due | {(1, 0)})


def test_both_programs_may_miss_the_store_of_the_other() -> None:
    """The litmus test "store buffering": acquire and release do not forbid it."""

    def program(own: str, other: str, result: str) -> Callable[[], Program]:
        def run() -> Program:
            yield Store(own, 1, release=True)
            found = yield Load(other, acquire=True)
            yield Store(result, found)

        return run

    found = outcomes(program("x", "y", "a"), program("y", "x", "b"))
    assert found == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_additions_are_never_lost_and_a_boundary_shows_them() -> None:
    def program(result: str) -> Callable[[], Program]:
        def run() -> Program:
            yield Add("x", synchronizes=False)
            yield Boundary()
            found = yield Load("x")
            yield Store(result, found)

        return run

    assert outcomes(program("a"), program("b")) == {(2, 2)}


def test_programs_that_wait_for_each_other_are_reported() -> None:
    def program(own: str, other: str) -> Callable[[], Program]:
        def run() -> Program:
            yield Await(own, lambda value: value == 1)
            yield Store(other, 1)

        return run

    explorer = Explorer([program("x", "y"), program("y", "x")], {"x": 0, "y": 0})
    assert explorer.explore(lambda memory: None) == Exploration(1, "all programs wait")
