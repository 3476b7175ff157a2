"""See when the ranks have stopped to move, although none of them has ended.

A rank moves when it begins something else, or when it computes and uses CPU time. So a rank that
compiles or reads a long prompt moves. One that is stopped, or waits for a file or a lock, does not.
A rank that waits for others or for its GPU moves only if it gets what it waits for, because such a
wait may use CPU time. If rank 0 computes a step and no rank moves, the step has stalled.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.device.board import COMPUTES, IDLE, Board, RankActivity

TICK_S = 0.5
STOPPED_S = 10.0  # longer than a debugger or a scheduler keeps a process by accident
# Of a rank that is not stopped: longer than one step of a GPU with a large budget of tokens, a
# slow file, or a compiler that is a process of its own.
STALL_S = 60.0
USED_S = 0.01  # of CPU time in a tick: the resolution of /proc
STOPPED = ("T", "t")  # states of a process in /proc, by a signal or by a debugger


class StallWatch:
    """Looks at the board now and then. It counts its own looks, not time: a container that is
    paused stops this process and the ranks together."""

    def __init__(self, board: Board, pids: list[int]) -> None:
        """`pids` are the processes of the ranks, in their order."""
        self._board, self._pids = board, pids
        self._before: list[RankActivity] = []
        self._used = [0.0] * len(pids)
        self._silent = 0.0

    def look(self) -> str | None:
        """Call this every TICK_S seconds. Returns why a step has stalled, or None."""
        now = self._board.read()
        used = [_cpu_seconds(pid) for pid in self._pids]
        moved = now != self._before
        for rank, each in enumerate(now):
            computed = used[rank] - self._used[rank] >= USED_S
            moved = moved or (each.activity == COMPUTES and computed)
        self._before, self._used = now, used
        is_idle = now[0].activity == IDLE
        self._silent = 0.0 if moved or is_idle else self._silent + TICK_S
        if self._silent < STOPPED_S:
            return None
        is_stopped = any(_state(pid) in STOPPED for pid in self._pids)
        if not is_stopped and self._silent < STALL_S:
            return None
        seconds = self._silent
        return f"The processes of the model have stalled for {seconds:g} s: {self._cause(now)}."

    def _cause(self, now: list[RankActivity]) -> str:
        stopped = [rank for rank, pid in enumerate(self._pids) if _state(pid) in STOPPED]
        if stopped:
            return f"{_names(stopped)} stopped by a signal"
        computing = [rank for rank, each in enumerate(now) if each.activity == COMPUTES]
        if computing:
            return f"{_names(computing)} waiting for something else than a rank"
        return "they wait for each other, or for a GPU"


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # a name may contain anything


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else ""


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in its own code and in the system's."""
    fields = _fields(pid)
    if not fields:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
