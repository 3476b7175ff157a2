"""Processes that share simulated cores, against manual calculation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loadtest.cores import PROTECTED, TURN, Events, Host, Process


def ends(cores: float, works: Sequence[tuple[float, float, int]]) -> list[float]:
    """Return when each work ends: (start, seconds, threads), each of a process of its own."""
    events = Events()
    host = Host(events, cores)
    found = [0.0] * len(works)

    def begin(index: int, seconds: float, threads: int) -> None:
        def ended() -> None:
            found[index] = events.now

        Process(host, threads).do(seconds, ended)

    for index, (start, seconds, threads) in enumerate(works):
        events.after(start, lambda i=index, s=seconds, t=threads: begin(i, s, t))
    events.run()
    return found


def test_host_with_enough_cores_slows_nothing() -> None:
    assert ends(2, [(0, 3, 1), (1, 1, 1)]) == pytest.approx([3, 2])


def test_host_lets_long_works_share_a_core_in_turns() -> None:
    # From 1 to 3 both have half of the core; the second is then done.
    assert ends(1, [(0, 3, 1), (1, 1, 1)]) == pytest.approx([4, 3], abs=2 * TURN)


def test_host_interrupts_a_turn_for_a_thread_that_wakes_unless_it_is_protected() -> None:
    wakes, short = TURN / 2, TURN / 8
    assert wakes > PROTECTED
    assert ends(1, [(0, 0.1, 1), (wakes, short, 1)])[1] == pytest.approx(wakes + short)
    soon = PROTECTED / 2
    assert ends(1, [(0, 0.1, 1), (soon, short, 1)])[1] == pytest.approx(TURN + short)


def test_host_work_after_work_keeps_the_turn_of_its_process() -> None:
    events = Events()
    host = Host(events, 1)
    one, other = Process(host), Process(host)
    done: list[str] = []
    one.do(PROTECTED / 4, lambda: done.append("first"))
    one.do(PROTECTED / 4, lambda: done.append("second"))
    other.do(PROTECTED / 4, lambda: done.append("other"))
    events.run()
    assert done == ["first", "second", "other"]


def test_host_counts_threads_and_fractions_of_cores() -> None:
    assert ends(2, [(0, 1, 2), (0, 1, 1)]) == pytest.approx([1.5, 1.5], abs=TURN)
    assert ends(1.5, [(0, 3, 1), (0, 3, 1)]) == pytest.approx([4, 4])


def test_process_does_its_work_in_order_of_arrival() -> None:
    events = Events()
    process = Process(Host(events, 4))
    done: list[tuple[str, float]] = []

    def more() -> None:
        done.append(("first", events.now))
        process.do(1.0, lambda: done.append(("third", events.now)))

    process.do(2.0, more)
    process.do(0.5, lambda: done.append(("second", events.now)))
    events.run()
    assert done == [("first", 2.0), ("second", 2.5), ("third", 3.5)]
