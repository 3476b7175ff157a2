"""The kernels that ran during a call, each with its begin and end.

On a GPU, torch's profiler records them. On a CPU, where Triton interprets its kernels, each launch
is timed instead: these times say nothing about a GPU, but the same names are launched.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}  # the profiler's categories of work on the device
PAUSE = 5.0  # microseconds; shorter gaps lie between the kernels of one graph


class KernelEvent(NamedTuple):
    """A kernel or a copy that ran: its name, its programs per axis, and microseconds."""

    name: str
    grid: tuple[int, ...]  # () of a copy
    begin: float
    end: float


def read_trace(trace: Mapping[str, Any]) -> list[KernelEvent]:
    """Return the device's events of a trace in Chrome's format, in the order in which they began.

    This is the format that torch.profiler's export_chrome_trace writes; times are microseconds.
    """
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") in KINDS:
            grid = tuple(event.get("args", {}).get("grid", ()))
            found.append(KernelEvent(event["name"], grid, event["ts"], event["ts"] + event["dur"]))
    return sorted(found, key=lambda event: event.begin)


def traced(run: Callable[[], object], keep: Path | None = None) -> list[KernelEvent]:
    """Return the kernels that `run` launched. `keep` is a file for the profiler's whole trace."""
    if not torch.cuda.is_available():
        with interpreted_launches() as found:
            run()
        return found
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        written = path.read_text(encoding="utf-8")
    if keep:
        keep.write_text(written, encoding="utf-8")
    return read_trace(json.loads(written))


@contextmanager
def interpreted_launches() -> Iterator[list[KernelEvent]]:
    """Yield a list that grows by each kernel that Triton's interpreter runs in this context."""
    from triton.runtime.interpreter import InterpretedFunction

    found: list[KernelEvent] = []
    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = launch(self, *args, grid=grid, **options)
        ended = time.perf_counter()
        found.append(KernelEvent(self.fn.__name__, tuple(grid), 1e6 * began, 1e6 * ended))
        return result

    with mock.patch.object(InterpretedFunction, "run", run):
        yield found


def idle_shares(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (% of the time in gaps longer than PAUSE, % in shorter gaps) of sorted spans."""
    reach = begun = spans[0][0]
    long = short = 0.0
    for begin, end in spans:
        gap = max(0.0, begin - reach)
        if gap > PAUSE:
            long += gap
        else:
            short += gap
        reach = max(reach, end)
    total = reach - begun
    return 100 * long / total, 100 * short / total
