"""The waterfall as trace events: Chrome's JSON format, which Perfetto and chrome://tracing read.

The format is that of Google's document "Trace Event Format". Times are microseconds from the
request's arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from server.glassbox.requests.step_log import RecordedRequest
from server.telemetry.phases import phases

PROCESS = 1
REQUEST_TRACK, STEP_TRACK, FIRST_CHOICE_TRACK = 1, 2, 3
Event = dict[str, Any]


def trace_events(request: RecordedRequest, report: Mapping[str, Any]) -> Event:
    """Return the document. `report` is that of the reader, and says how steps are split."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(request, report))}


def _events(request: RecordedRequest, report: Mapping[str, Any]) -> Iterator[Event]:
    arrival = request.opened.arrival
    yield _name("process_name", 0, "penstock")
    yield _name("thread_name", REQUEST_TRACK, f"request {request.opened.request_id}")
    facts = {"parts_ms": report["parts"], "who": report["who"], "fit": report["fit"]}
    yield _slice("request", REQUEST_TRACK, 0.0, request.ended - arrival, facts)
    yield _name("thread_name", STEP_TRACK, "engine steps")
    for step in report["steps"]:
        facts = {name: value for name, value in step.items() if name not in ("at", "ms")}
        name = "others' step" if step["queue"] else "step"
        yield _slice(name, STEP_TRACK, step["at"] / 1000, step["ms"] / 1000, facts)
    for choice in request.choices:
        track = FIRST_CHOICE_TRACK + choice.index
        yield _name("thread_name", track, f"choice {choice.index}")
        for phase in phases(choice, request.ended):
            length = phase.end - phase.start
            yield _slice(phase.name, track, phase.start - arrival, length, phase.attributes)


def _name(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}


def _slice(name: str, track: int, begin: float, seconds: float, facts: Mapping[str, Any]) -> Event:
    """Return a complete event ("X"). `begin` and `seconds` are in seconds."""
    return {
        "ph": "X",
        "cat": "penstock",
        "name": name,
        "pid": PROCESS,
        "tid": track,
        "ts": round(begin * 1e6, 3),
        "dur": round(max(seconds, 0.0) * 1e6, 3),
        "args": dict(facts),
    }
