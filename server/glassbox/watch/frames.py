"""The JSON of GET /ui/api/watch and /ui/api/blocks, for a reader with or without admin rights.

Times are microseconds since the server's `epoch`. A reader without admin rights gets its own
requests, and only totals of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.protocol.journal import BlockEvent
from engine.protocol.outputs import EngineStats
from engine.protocol.ready import Ready
from engine.protocol.watch import QueueState
from server.glassbox.requests.report import Reader
from server.glassbox.watch.block_map import BlockMap, RequestRow, row_of
from server.glassbox.watch.live_engine import LiveEngine, Snapshot
from server.glassbox.watch.viewer import Counts, TracedStep

MOST_ROWS = 64  # requests in a frame without blocks
Json = dict[str, Any]


def facts(info: Ready) -> Json:
    """Return what does not change: the KV cache's shape and the limits of a step."""
    groups = [
        {"layers": group.layers, "window": group.window, "is_cross": group.is_cross}
        for group in info.kv_groups
    ]
    return {
        "groups": groups,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
    }


def snapshot_document(live: LiveEngine, snapshot: Snapshot, reader: Reader) -> Json:
    """Return the answer of GET /ui/api/blocks: all tables, and what the prefix cache finds."""
    shown = BlockMap(snapshot.blocks)
    requests = []
    held: set[int] = set()
    for request in shown.requests.values():
        if not reader.sees(request.id):
            continue
        entry = _named(row_of(request), live, reader)
        groups = max(request.tables, default=-1) + 1
        entry["tables"] = [request.tables.get(group, []) for group in range(groups)]
        held.update(*request.tables.values())
        requests.append(entry)
    found = shown.findable if reader.sees_all else shown.findable & held
    return {
        "seq": snapshot.number,
        "t": _us(live, snapshot.at),
        "requests": requests,
        "findable": sorted(found),
        "queue": _queue(snapshot.blocks.queue, reader),
        "stats": _stats(snapshot.blocks.stats, snapshot.counts),
    }


def totals(live: LiveEngine, at: float, reader: Reader) -> Json:
    """Return a frame without blocks: the requests as they are now, at most MOST_ROWS."""
    rows = []
    if live.map is not None:
        for request in live.map.requests.values():
            if reader.sees(request.id):
                rows.append(_named(row_of(request), live, reader) | {"blocks": request.num_blocks})
    rows.sort(key=lambda row: (row["state"] != "running", row["priority"], row["id"]))
    return {
        "t": _us(live, at),
        "requests": rows[:MOST_ROWS],
        "queue": _queue(live.queue, reader),
        "stats": _stats(live.stats, live.counts),
    }


class FrameWriter:
    """Writes one viewer's frames. Decoding requests are sent as differences to the step before."""

    def __init__(self, live: LiveEngine) -> None:
        self._live = live
        self._decoding: set[int] = set()

    def lost(self, at: float) -> Json:
        """Return the frame for a reader that missed some, and must ask for the blocks again."""
        self._decoding = set()
        return {"t": _us(self._live, at), "lost": True}

    def frame(self, steps: Sequence[TracedStep], reader: Reader) -> Json:
        """Return one frame for all of these steps."""
        live, last = self._live, steps[-1]
        events = [event for step in steps for event in step.trace.events]
        rows = [row for row in _rows(steps) if reader.sees(row.id)]
        return {
            "seq": last.number,
            "t": _us(live, last.trace.at),
            "steps": [self._step(step, reader) for step in steps if step.trace.launched],
            "lenses": [self._lens(begin, end) for s in steps for begin, end in s.trace.lenses],
            "requests": [_row(row, live, reader) for row in rows],
            "kv": _events(events, reader, live.map),
            "queue": _queue(last.trace.queue, reader),
            "stats": _stats(last.stats, last.counts),
        }

    def _lens(self, begin: float, end: float) -> list[int]:
        """Return [begin, microseconds] of a piece of a lens, which runs between steps."""
        return [_us(self._live, begin), round((end - begin) * 1e6)]

    def _step(self, step: TracedStep, reader: Reader) -> list[Any]:
        """Return [number, begin, microseconds, chunks, joined, left, preempted, others].

        `chunks` are [id, start, tokens]; an encoded text has start -1. `joined` and `left` are the
        requests that decode in this step and did not in the last, and the opposite. `others` are
        the tokens of requests that are not shown: [prompt tokens, decodes].
        """
        trace = step.trace
        chunks = [[c.id, c.start, c.count] for c in trace.chunks]
        chunks += [[text.id, -1, text.count] for text in trace.encoded]
        shown = [chunk for chunk in chunks if reader.sees(chunk[0])]
        decoding = {key for key in trace.decodes if reader.sees(key)}
        preempted = [event.id for event in trace.events if event.kind == "preempt"]
        others = [
            sum(chunk[2] for chunk in chunks) - sum(chunk[2] for chunk in shown),
            len(trace.decodes) - len(decoding),
        ]
        entry = [
            trace.step,
            _us(self._live, step.begin),
            round((trace.at - step.begin) * 1e6),
            shown,
            sorted(decoding - self._decoding),
            sorted(self._decoding - decoding),
            [key for key in preempted if reader.sees(key)],
            others,
        ]
        self._decoding = decoding
        return entry


def _rows(steps: Sequence[TracedStep]) -> Iterable[RequestRow]:
    """Return the requests that changed in these steps, as they are after the last one.

    A decode that is no change, in a later step, has one token.
    """
    changed: dict[int, RequestRow] = {}
    for step in steps:
        for key in step.trace.decodes:
            row = changed.get(key)
            if row is not None:
                changed[key] = replace(row, generated_tokens=row.generated_tokens + 1)
        changed |= step.changed
    return changed.values()


def _events(
    events: Sequence[BlockEvent], reader: Reader, block_map: BlockMap | None
) -> list[list[Any]]:
    """Return the events in their order; those of the prefix cache in runs.

    ["take", id, group, first, blocks], ["pass", id, group, first, count], ["preempt", id],
    ["end", id], ["find", blocks], ["forget", blocks].
    """
    own: Collection[int] = ()
    if not reader.sees_all:
        own = _own_blocks(events, reader, block_map)
    entries: list[list[Any]] = []
    for event in events:
        if event.kind in ("find", "forget"):
            if not reader.sees_all and event.id not in own:
                continue
            if entries and entries[-1][0] == event.kind:
                entries[-1][1].append(event.id)
            else:
                entries.append([event.kind, [event.id]])
        elif not reader.sees(event.id):
            continue
        elif event.kind == "take":
            entries.append(["take", event.id, event.group, event.first, list(event.blocks)])
        elif event.kind == "pass":
            entries.append(["pass", event.id, event.group, event.first, len(event.blocks)])
        else:
            entries.append([event.kind, event.id])
    return entries


def _own_blocks(
    events: Sequence[BlockEvent], reader: Reader, block_map: BlockMap | None
) -> set[int]:
    """Return the blocks that requests of this reader hold, or have taken in these events."""
    own: set[int] = set()
    for event in events:
        if event.kind == "take" and reader.sees(event.id):
            own.update(event.blocks)
    if block_map is not None:
        for request in block_map.requests.values():
            if reader.sees(request.id):
                own.update(*request.tables.values())
    return own


def _queue(queue: QueueState, reader: Reader) -> Json:
    """Return the shown requests of the queue with their places, and why the first one waits."""
    shown = [[key, place] for place, key in enumerate(queue.ids) if reader.sees(key)]
    first = queue.ids[0] if queue.ids and reader.sees(queue.ids[0]) else None
    return {
        "requests": shown,
        "first": first,
        "reason": queue.reason if queue.ids else None,
        "needed": queue.needed,
        "available": queue.available,
        "sharing": queue.sharing if reader.sees(queue.sharing) else None,
    }


def _stats(stats: EngineStats, counts: Counts) -> Json:
    return {
        "step": stats.step,
        "running": stats.running,
        "waiting": stats.waiting,
        "held": stats.blocks_held,
        "cached": stats.blocks_cached,
        "total": stats.blocks_total,
        "preemptions": stats.preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "prefilled": counts.prefilled,
        "generated": counts.generated,
    }


FIELDS = ("id", "state", "prompt", "cached", "out", "priority", "arrived", "name")


def _row(row: RequestRow, live: LiveEngine, reader: Reader) -> list[Any]:
    """Return the values of FIELDS."""
    return [
        row.id,
        row.state,
        row.prompt_tokens,
        row.cached_tokens,
        row.generated_tokens,
        row.priority,
        _us(live, row.arrival),
        reader.names.get(row.id),
    ]


def _named(row: RequestRow, live: LiveEngine, reader: Reader) -> Json:
    return dict(zip(FIELDS, _row(row, live, reader), strict=True))


def _us(live: LiveEngine, at: float) -> int:
    """Return a time of CLOCK_MONOTONIC as microseconds since the epoch of `live`."""
    return round((at - live.epoch) * 1e6)
