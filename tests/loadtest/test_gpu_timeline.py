"""The account of a decode step, from short lists of kernels whose figures are known."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from loadtest.gpu import timeline
from loadtest.gpu.timeline import Place, summarise, timeline_rows
from loadtest.gpu.trace import KernelEvent, idle_shares, read_trace


def step(begin: float) -> list[KernelEvent]:
    """Two layers of a linear and its attention. The second linear overlaps the attention."""
    return [
        KernelEvent("linear", (64, 1, 1), begin, begin + 4),
        KernelEvent("decode", (8, 2, 1), begin + 5, begin + 10),
        KernelEvent("linear", (64, 1, 1), begin + 8, begin + 16),
        KernelEvent("decode", (8, 2, 1), begin + 16, begin + 20),
        KernelEvent("Memcpy DtoH", (), begin + 20, begin + 21),
    ]


EVENTS = step(0.0) + step(30.0)


def test_summary_counts_launches_of_each_place_and_takes_medians() -> None:
    first, decode, second, copy = summarise(EVENTS, 2)
    assert first.place == Place("linear", (64, 1, 1), "Memcpy DtoH")
    assert (first.launches, first.median) == (1, 4)
    assert first.gap == 9  # 21 to 30, before the second step; the first one has no gap
    assert decode.place == Place("decode", (8, 2, 1), "linear")
    assert (decode.launches, decode.median, decode.gap) == (2, 4.5, 0.5)
    assert (second.launches, second.median, second.gap) == (1, 8, -2)
    assert str(copy.place) == "Memcpy DtoH [copy] after decode"


def test_times_added_by_all_places_are_the_whole_time() -> None:
    times = summarise(EVENTS, 2)
    assert sum(time.added for time in times) == pytest.approx(51 / 2)
    added = {str(time.place): time.added for time in times}
    assert added["linear [64x1x1] after decode"] == 6, "8 us, of which 2 are behind the attention"


def test_kernel_that_ends_before_an_earlier_one_adds_nothing() -> None:
    events = [KernelEvent("long", (1,), 0, 10), KernelEvent("short", (1,), 2, 5)]
    assert [time.added for time in summarise(events, 1)] == [10, 0]


def test_rows_name_the_step_its_launches_and_the_largest_kernel_first() -> None:
    rows = timeline_rows("timeline, m, batch 1", summarise(EVENTS, 2))
    assert (rows[0].what, rows[0].value) == ("timeline, m, batch 1, step", 25.5)
    assert (rows[1].what, rows[1].value) == ("timeline, m, batch 1, launches a step", 5)
    added = [row.figures["added_us"] for row in rows[2:]]
    assert added == sorted(added, reverse=True)
    assert rows[2].figures.keys() == {"launches", "gap_us", "added_us"}


def test_trace_of_the_profiler_gives_kernels_and_copies_in_order() -> None:
    """Events as torch 2.11 writes them; those of the host are left out."""
    kernel: dict[str, Any] = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7}
    trace = {
        "traceEvents": [
            kernel | {"name": "_norm_kernel", "ts": 12.5, "dur": 1.5, "args": {"grid": [3, 1, 1]}},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 9.0, "dur": 2.0},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 8.0, "dur": 9.0},
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        ]
    }
    assert read_trace(trace) == [
        KernelEvent("Memcpy HtoD", (), 9.0, 11.0),
        KernelEvent("_norm_kernel", (3, 1, 1), 12.5, 14.0),
    ]


def test_idle_shares_separate_pauses_from_gaps_between_kernels() -> None:
    # Busy 0-10, a gap of 2 within a graph, busy 12-30 (two kernels overlap), 10 between replays.
    spans = [(0.0, 10.0), (12.0, 25.0), (20.0, 30.0), (40.0, 50.0)]
    between, inside = idle_shares(spans)
    assert between == pytest.approx(100 * 10 / 50)
    assert inside == pytest.approx(100 * 2 / 50)


def test_idle_is_measured_at_one_stream_and_at_256(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def traces(bench: Any, model: str, batches: tuple[int, ...]) -> list[list[KernelEvent]]:
        seen.append(batches)
        return [EVENTS] * len(batches)

    monkeypatch.setattr(timeline, "traced_decodes", traces)
    monkeypatch.setattr(timeline, "IDLE_BATCHES", (1, 256))
    rows = timeline.idle(type("Real", (), {"smoke": False})())
    assert seen == [(1, 256)]
    assert [row.what for row in rows if row.goal is not None] == [
        "0.6B, 1 stream, GPU idle between replays",
        "0.6B, 256 streams, GPU idle between replays",
    ]
