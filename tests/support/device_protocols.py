"""How programs on GPUs agree, as models for `tests/support/interleavings.py`.

Each function returns an Explorer of three programs. `planted` names a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

PROGRAMS = 3
OTHERS = {0: (1, 2), 1: (0, 2), 2: (0, 1)}


def _is(due: int) -> Callable[[int], bool]:
    return lambda value: value == due


def _at_least(due: int) -> Callable[[int], bool]:
    return lambda value: value >= due


# ---- barrier of all programs of a persistent kernel ----------------------------------------------


def grid_barrier(planted: str = "", phases: int = 3, steps: int = 2) -> Exploration:
    """One counter for each phase, which is never reset. The target is epoch * programs.

    A program writes its cell of the phase, passes the barrier and reads the cells of the others.
    """

    def program(own: int) -> Program:
        for step in range(steps):
            for phase in range(phases):
                value = step + 1
                counter = f"counter {phase}"
                if planted == "write after arrival":
                    yield Add(counter, wants=False)
                    yield Store(f"cell {phase} {own}", value)
                else:
                    yield Store(f"cell {phase} {own}", value)
                    synchronizes = planted != "arrival without release"
                    yield Add(counter, synchronizes, wants=False)
                epoch = 1 if planted == "target without epoch" else step + 1
                acquires = planted != "wait without acquire"
                yield Await(counter, _at_least(epoch * PROGRAMS), acquire=acquires)
                if planted == "reset too early" and own == 0:
                    yield Store(counter, step * PROGRAMS)
                for other in OTHERS[own]:
                    found = yield Load(f"cell {phase} {other}")
                    assert found == value, f"phase {phase} of step {step} read step {found - 1}"

    counters = {f"counter {phase}": 0 for phase in range(phases)}
    cells = {f"cell {phase} {own}": 0 for phase in range(phases) for own in range(PROGRAMS)}
    programs = [partial(program, own) for own in range(PROGRAMS)]
    return Explorer(programs, counters | cells).explore(lambda memory: None)


# ---- last arriver: split K, reduction of attention -----------------------------------------------


def last_arriver(planted: str = "", launches: int = 2) -> Exploration:
    """Each program writes a partial and adds to the counter; the last one adds up and resets.

    The order of a sum shows in these totals: total = 10 * total + partial.
    """

    def program(own: int) -> Program:
        for launch in range(launches):
            partial_sum = 3 * launch + own + 1
            if planted == "counts before it writes":
                arrived = yield Add("counter")
                yield Store(f"partial {own}", partial_sum)
            else:
                yield Store(f"partial {own}", partial_sum)
                arrived = yield Add("counter", synchronizes=planted != "counts without release")
            if planted == "reset too early" and arrived == 0:
                yield Store("counter", 0)
            if arrived == PROGRAMS - 1:
                total = 0
                order = (own, *OTHERS[own]) if planted == "adds in order of arrival" else range(3)
                for each in order:
                    found = yield Load(f"partial {each}")
                    total = 10 * total + found
                yield Store(f"total {launch}", total)
                if planted != "no reset":
                    yield Store("counter", 0)
            yield Boundary()

    def check(memory: dict[str, int]) -> str | None:
        totals = [memory[f"total {launch}"] for launch in range(launches)]
        due = [123, 456][:launches]
        if totals != due or memory["counter"] != 0:
            return f"totals {totals}, counter {memory['counter']}"
        return None

    places = {"counter": 0} | {f"partial {own}": 0 for own in range(PROGRAMS)}
    places |= {f"total {launch}": 0 for launch in range(launches)}
    return Explorer([partial(program, own) for own in range(PROGRAMS)], places).explore(check)


# ---- sums of several GPUs ------------------------------------------------------------------------


def two_slot_flags(planted: str = "", sums: int = 3) -> Exploration:
    """Each rank writes to its place in the buffers of the others, and then a flag.

    A rank reads when the flags of the others hold the number of the sum. Sums use two slots in
    turn, and no rank tells the others that it has read: `engine/kernels/triton/rank_sum.py`. A
    program here is that of one rank. Programs of a rank with other numbers use other memory.
    """
    slots = 1 if planted == "slot reused" else 2

    def program(own: int) -> Program:
        for number in range(1, sums + 1):
            slot = number % slots
            released = planted != "flag without release"
            for other in OTHERS[own]:
                data = Store(f"data {other} {slot} {own}", number)
                flag = Store(f"flag {other} {slot} {own}", number, released)
                if planted == "flag before data":
                    data, flag = flag, data
                yield data
                yield flag
            if planted == "read before flag":
                for other in OTHERS[own]:
                    found = yield Load(f"data {own} {slot} {other}")
                    assert found == number, f"sum {number} read {found}"
            for other in OTHERS[own]:
                acquires = planted != "wait without acquire"
                yield Await(f"flag {own} {slot} {other}", _is(number), acquire=acquires)
            for other in OTHERS[own]:
                found = yield Load(f"data {own} {slot} {other}")
                assert found == number, f"sum {number} read {found}"

    places = {
        f"{kind} {reader} {slot} {writer}": 0
        for kind in ("data", "flag")
        for reader in range(PROGRAMS)
        for slot in range(slots)
        for writer in OTHERS[reader]
    }
    return Explorer([partial(program, own) for own in range(PROGRAMS)], places).explore(
        lambda memory: None
    )
