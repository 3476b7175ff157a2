"""`make fuzz`: `python -m tests.fuzz [--minutes 60] [--seed N] [TARGET …]`.

The targets take turns. An input that fails is stored under tests/fuzz/cases, and its target gets
no further turn; one that kills the process is stored by the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import time
import traceback
from collections import defaultdict

import psutil

from tests.fuzz.run import Tally, fuzz
from tests.fuzz.targets import BY_NAME

TURN_S = 20.0
MOST_MEMORY = 6 << 30  # bytes of address space; an input that takes more ends the run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(BY_NAME), metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    totals: dict[str, Tally] = defaultdict(Tally)
    memory: list[int] = []
    end = time.monotonic() + 60 * given.minutes
    seed, targets = given.seed, list(given.targets)
    while time.monotonic() < end and targets:
        for name in tuple(targets):
            seed += 1
            left = max(1.0, min(TURN_S, end - time.monotonic()))
            try:
                tally = asyncio.run(fuzz(BY_NAME[name], left, seed))
            except Exception:
                traceback.print_exc()
                targets.remove(name)
                continue
            total = totals[name]
            total.inputs += tally.inputs
            total.seconds += tally.seconds
        gc.collect()
        memory.append(psutil.Process().memory_info().rss >> 20)
    sys.stdout.write(f"{'target':12} {'inputs':>10} {'seconds':>8}\n")
    for name, total in totals.items():
        sys.stdout.write(f"{name:12} {total.inputs:10} {total.seconds:8.0f}\n")
    sys.stdout.write(f"memory after each round of all targets, in MiB: {memory}\n")
    return int(targets != given.targets)


if __name__ == "__main__":
    sys.exit(main())
