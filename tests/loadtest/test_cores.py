"""Processes that share simulated cores, against manual calculation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loadtest.cores import SLICE, TICK, Events, Host, Process


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
    assert ends(1, [(0, 3, 1), (1, 1, 1)]) == pytest.approx([4, 3], abs=2 * TICK)


def test_host_interrupts_a_thread_whose_slice_is_over_and_not_before() -> None:
    short = SLICE / 10
    late, soon = 1.5 * SLICE, 0.5 * SLICE
    assert ends(1, [(0, 0.1, 1), (late, short, 1)])[1] == pytest.approx(late + short)
    assert ends(1, [(0, 0.1, 1), (soon, short, 1)])[1] == pytest.approx(TICK + short)


def test_host_thread_that_is_owed_time_interrupts_at_once() -> None:
    """A thread that slept while it was owed time does not wait for the end of a slice."""
    events = Events()
    host = Host(events, 1)
    busy, waking = Process(host), Process(host)
    short = SLICE / 10
    ended: list[float] = []
    busy.do(1.0, lambda: None)
    again = TICK + 3 * short
    for at in (SLICE / 2, again):
        events.after(at, lambda: waking.do(short, lambda: ended.append(events.now)))
    events.run()
    assert ended == pytest.approx([TICK + short, again + short])


def test_host_idle_core_takes_over_a_thread_that_waits() -> None:
    # The third work waits; when the second ends, its core takes the thread that waits.
    works = [(0.0, 1.0, 1), (0.0, 0.1, 1), (0.0, 0.05, 1)]
    assert ends(2, works) == pytest.approx([1.0, 0.1, 0.05], abs=0.1 + TICK)
    assert sum(ends(2, works)[1:]) < 0.1 + 0.15 + TICK


def test_host_work_after_work_keeps_the_core_of_its_process() -> None:
    events = Events()
    host = Host(events, 1)
    one, other = Process(host), Process(host)
    done: list[str] = []
    one.do(SLICE / 4, lambda: done.append("first"))
    one.do(SLICE / 4, lambda: done.append("second"))
    other.do(SLICE / 4, lambda: done.append("other"))
    events.run()
    assert done == ["first", "second", "other"]


def test_host_counts_threads_and_fractions_of_cores() -> None:
    assert ends(2, [(0, 1, 2), (0, 1, 1)]) == pytest.approx([1.5, 1.5], abs=0.3)
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


def test_process_does_next_what_a_piece_of_work_asks_for() -> None:
    events = Events()
    process = Process(Host(events, 1))
    done: list[str] = []
    process.do(1.0, lambda: process.do_next(1.0, lambda: done.append("next")))
    process.do(1.0, lambda: done.append("waiting"))
    events.run()
    assert done == ["next", "waiting"]
    assert process.worked == pytest.approx(3.0)


def test_process_that_wakes_pays_for_it_and_for_cold_caches_once() -> None:
    events = Events()
    host = Host(events, 1)
    process = Process(host, wake=0.01, cold=0.1)
    other = Process(host, cold=0.5)
    found: list[float] = []
    process.do(1.0, lambda: found.append(events.now))
    process.do(1.0, lambda: found.append(events.now))  # it is awake
    # The core is idle until 5. The other then warms its own caches alone.
    events.after(5.0, lambda: other.do(1.0, lambda: process.do(1.0, end)))

    def end() -> None:
        found.append(events.now)
        events.after(1.0, lambda: process.do(1.0, lambda: found.append(events.now)))

    events.run()
    assert found == pytest.approx([1.11, 2.11, 5 + 1.5 + 1.11, 5 + 1.5 + 1.11 + 1 + 1.11])
    assert process.worked == pytest.approx(4 + 3 * 0.11)
