"""The account of a decode step: what each kernel takes in its place, and what lies between."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from loadtest.gpu.bench import Bench, Row
from loadtest.gpu.trace import KernelEvent, idle_shares, traced
from loadtest.inprocess import WARM_UP

STEPS = 30
NAME = 60  # characters; names of cuBLAS's kernels are longer


class Place(NamedTuple):
    """A kernel by its place in a step: layers launch the same names on other shapes."""

    name: str
    grid: tuple[int, ...]
    after: str  # the name of the kernel before it

    def __str__(self) -> str:
        programs = "x".join(map(str, self.grid)) or "copy"
        return f"{self.name[:NAME]} [{programs}] after {self.after[:NAME]}"


class KernelTime(NamedTuple):
    """The times of a kernel at one place, in microseconds."""

    place: Place
    launches: float  # a step
    median: float  # from its begin to its end; an overlapped kernel also waits in this time
    gap: float  # median, since all kernels before had ended; negative if they overlap
    added: float  # by which its launches move the end of a step: all places add up to the step


def summarise(events: Sequence[KernelEvent], steps: int) -> list[KernelTime]:
    """Return the time of each place, in the order of their first launches.

    `events` are those of `steps` equal steps, in the order in which they began. The first kernel of
    all has no gap and comes after the last one, as it does in the other steps.
    """
    taken: dict[Place, list[float]] = {}
    gaps: dict[Place, list[float]] = {}
    added: dict[Place, float] = {}
    reach = events[0].begin
    before = events[-1].name
    for number, event in enumerate(events):
        place = Place(event.name, event.grid, before)
        taken.setdefault(place, []).append(event.end - event.begin)
        of_place = gaps.setdefault(place, [])
        if number:
            of_place.append(event.begin - reach)
        added[place] = added.get(place, 0.0) + max(event.end - reach, 0.0)
        reach = max(reach, event.end)
        before = event.name
    return [
        KernelTime(
            place,
            len(times) / steps,
            statistics.median(times),
            statistics.median(gaps[place]) if gaps[place] else 0.0,
            added[place] / steps,
        )
        for place, times in taken.items()
    ]


def timeline_rows(title: str, times: Sequence[KernelTime]) -> list[Row]:
    """Return rows for the JSON: the step, its launches, and each kernel at its place."""
    step = sum(time.added for time in times)
    rows = [
        Row(f"{title}, step", step, "us"),
        Row(f"{title}, launches a step", sum(time.launches for time in times), ""),
    ]
    for time in sorted(times, key=lambda time: -time.added):
        share = 100 * time.added / step if step else 0.0
        figures = {"launches": time.launches, "gap_us": time.gap, "added_us": time.added}
        note = f"{time.launches:g} a step, gap {time.gap:.2f} us, adds {time.added:.1f} us, "
        note += f"{share:.1f} %"
        rows.append(Row(f"{title}, {time.place}", time.median, "us", note=note, figures=figures))
    return rows


def traced_decodes(bench: Bench, model: str, batches: Sequence[int]) -> list[list[KernelEvent]]:
    """Return the events of STEPS decode steps at context 1,024, for each number of streams."""
    context, steps, warm_up = (16, 2, 1) if bench.smoke else (1024, STEPS, WARM_UP)
    engine = bench.engine(
        model,
        attention_backend="triton",
        max_num_seqs=max(batches),
        max_model_len=2 * context,
        max_num_batched_tokens=4096,
    )
    found = []
    for batch in batches:
        works = bench.works(model, batch, context - steps // 2, context)
        measure = partial(traced, keep=bench.profile)
        found.append(engine.while_decoding(works, steps, measure, warm_up))
    return found


def timeline(bench: Bench) -> list[Row]:
    """Measure each kernel of a decode step in its place."""
    steps = 2 if bench.smoke else STEPS
    rows: list[Row] = []
    for model, batches in (("qwen3-0.6b", (1,)), ("llama-3.1-8b", (1, 32))):
        batches = (1, 2) if bench.smoke and len(batches) > 1 else batches
        with bench.triton():
            traces = traced_decodes(bench, model, batches)
        for batch, events in zip(batches, traces, strict=True):
            title = f"timeline, {model}, batch {batch}"
            rows += timeline_rows(title, summarise(events, steps))
    return rows


IDLE_BATCHES = (1, 256)


def idle(bench: Bench) -> list[Row]:
    """Measure the time in which no kernel runs, at one stream and at 256."""
    rows = []
    batches = (1, 2) if bench.smoke else IDLE_BATCHES
    for batch, events in zip(batches, traced_decodes(bench, "qwen3-0.6b", batches), strict=True):
        between, inside = idle_shares([(event.begin, event.end) for event in events])
        streams = f"0.6B, {batch} stream{'' if batch == 1 else 's'}"
        rows += [
            Row(f"{streams}, GPU idle between replays", between, "%", 2, True),
            Row(f"{streams}, gaps between kernels of a graph", inside, "%"),
        ]
    return rows
