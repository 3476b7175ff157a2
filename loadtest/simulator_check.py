"""Check the accuracy of the simulator: compare two real replicas with their prediction.

Rounds alternate between calibration and measurement. StepTime is fitted to the calibration: other
requests of the same workload, from few clients and from more. The measurement is a closed loop and
an open loop below saturation. One fit to all rounds predicts every round, and the medians over the
rounds are compared.

The speed of rented and shared cores changes from minute to minute; alternating exposes calibration
and measurement to the same changes. Both replicas and the client run on the same cores. The
machine's load is recorded with every round.

    python -m loadtest.simulator_check conversation_trace.jsonl --json FIGURES --save MODEL.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from deploy.ray.policies import POLICIES, Policy, prefix_hashes
from engine.config import EngineConfig
from loadtest.errors import BenchError
from loadtest.http_client import Target, exchange, stream
from loadtest.measure import Load, Measured, Point, point
from loadtest.schedule import DEMO_VOCABULARY, Ask, asks, timetable
from loadtest.servers import Penstock
from loadtest.simulate import FittedReplica, Simulation
from loadtest.step_time import Scrape, fit
from loadtest.workload import Scale, Workload, workload

REPLICAS = 2
# The demo model, with one thread per replica, so that no replica spins on the other's core.
CONFIG = EngineConfig(block_size=16, num_gpu_blocks_override=4096, threads=1)
MAX_MODEL_LEN, STEP_TOKENS = 1024, 256
SCALE = Scale(16 / 512, 16 / 512)  # a block of the Mooncake trace becomes a KV block
# Clients per replica: with few, steps are mostly prefill; with more, they are mostly decode.
CALIBRATION = (1, 2, 8)
LATER = 300  # calibration skips this number of requests, which the measurement uses
SCRAPE_S = 0.5
POLICY = "prefix"
CLIENTS = 16  # clients of the closed loop


@dataclass(frozen=True)
class Asked:
    """The requests of one measurement, which are the same for every call."""

    workload: Workload
    seed: int

    def endless(self) -> Iterator[Ask]:
        return asks(self.workload, DEMO_VOCABULARY, self.seed)

    def timetable(self, rate: float, seconds: float) -> list[Ask]:
        return timetable(self.workload, rate, seconds, DEMO_VOCABULARY, self.seed)

    def other(self) -> Asked:
        """Return different requests, which share no cached prefix with these."""
        return replace(self, seed=self.seed + 1_000_000)


@dataclass
class Calibration:
    """Measurements of the replicas under later requests of the workload.

    `runs` has a list of scrapes for each server and load. `ttft` has the seconds to first token
    that clients saw between the first and the last scrape.

    Loads with fixed lengths would not be enough. With different lengths, decodes fall into several
    groups, and long prompts attend to many tokens; StepTime has no terms for either.
    """

    workload: Workload
    runs: list[list[Scrape]] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)

    async def take(self, targets: Sequence[Target], seconds: float, seed: int) -> None:
        """Run every load in turn, on all replicas at once, for `seconds` each."""
        for number, clients in enumerate(CALIBRATION):
            seeds = (2_000_000 + 1000 * seed + 10 * number + i for i in range(len(targets)))
            await asyncio.gather(
                *(self._load(target, clients, seconds, next(seeds)) for target in targets)
            )

    async def _load(self, target: Target, clients: int, seconds: float, seed: int) -> None:
        endless = islice(asks(self.workload, DEMO_VOCABULARY, seed), LATER, None)
        done = asyncio.Event()
        firsts: list[tuple[float, float]] = []  # (time of the first token, seconds it took)

        async def client() -> None:
            while not done.is_set():
                completion = await stream(target, "/v1/completions", next(endless).body)
                if completion.arrivals:
                    first = completion.arrivals[0]
                    firsts.append((first, first - completion.started))

        waiting = [asyncio.create_task(client()) for _ in range(clients)]
        await asyncio.sleep(SCRAPE_S)  # until all clients have sent a request
        scrapes = [await scrape(target)]
        while scrapes[-1].at < scrapes[0].at + seconds:
            await asyncio.sleep(SCRAPE_S)
            scrapes.append(await scrape(target))
        done.set()
        await asyncio.gather(*waiting)
        self.runs.append(scrapes)
        begin, end = scrapes[0].at, scrapes[-1].at
        self.ttft += [took for first, took in firsts if begin <= first <= end]


async def scrape(target: Target) -> Scrape:
    this = await exchange(target, "/metrics", None, limit_s=10)
    return Scrape.parse(time.monotonic(), this.body.decode())


class Router:
    """Sends requests to real replicas by the same policy as the simulation."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._policy: Policy[int] = POLICIES[POLICY]()
        self._loads = dict.fromkeys(range(len(targets)), 0)
        self.measured: list[Measured] = []

    async def send(self, ask: Ask, intended: float | None = None) -> None:
        """Send one request. `intended` is its arrival on CLOCK_MONOTONIC (default: now)."""
        prefix = prefix_hashes(ask.prompt, CONFIG.block_size)
        chosen = self._policy.rank(prefix, self._loads)[0]
        self._policy.record(prefix, chosen)
        self._loads[chosen] += 1
        done = await stream(self._targets[chosen], "/v1/completions", ask.body)
        self._loads[chosen] -= 1
        self.measured.append(Measured(done, done.started if intended is None else intended))

    async def open_loop(self, plan: Sequence[Ask], begin: float) -> None:
        async with asyncio.TaskGroup() as group:
            for ask in plan:
                await asyncio.sleep(begin + ask.at - time.monotonic())
                group.create_task(self.send(ask, begin + ask.at))

    async def closed_loop(self, endless: Iterator[Ask], clients: int, end: float) -> None:
        async def client() -> None:
            while time.monotonic() < end:
                await self.send(next(endless))

        await asyncio.gather(*(client() for _ in range(clients)))


async def measure(targets: Sequence[Target], load: Load, seconds: float, asked: Asked) -> Point:
    """Measure `load` on the real replicas and return its point."""
    router, cpu, begin = Router(targets), time.process_time(), time.monotonic()
    if load.loop == "open":
        await router.open_loop(asked.timetable(load.value, seconds), begin)
    else:
        await router.closed_loop(asked.endless(), int(load.value), begin + seconds)
    busy = (time.process_time() - cpu) / (time.monotonic() - begin)
    return point(load, 1, (begin, begin + seconds), router.measured, None, busy)


def predict(fitted: FittedReplica, load: Load, seconds: float, asked: Asked) -> Point:
    """Simulate `load` and return its point."""
    simulation = Simulation(fitted, REPLICAS, POLICIES[POLICY]())
    if load.loop == "open":
        measured = simulation.open_loop(asked.timetable(load.value, seconds))
    else:
        measured = simulation.closed_loop(asked.endless(), int(load.value), seconds)
    return point(load, 1, (0.0, seconds), measured, None, 0.0)


@dataclass(frozen=True)
class Round:
    """The measurements of one round."""

    asked: Asked
    closed: Point
    open: Point
    machine_load: float  # load average of the last minute, at the end of the round

    def figures(self, fitted: FittedReplica, seconds: float) -> dict[str, Any]:
        """Return the measured and the predicted figures of the same requests."""
        found: dict[str, Any] = {"load_1min": self.machine_load}
        for real, asked in ((self.closed, self.asked), (self.open, self.asked.other())):
            foretold = predict(fitted, real.load, seconds, asked)
            found[real.load.loop] = {
                "load": str(real.load),
                "measured": summary(real),
                "predicted": summary(foretold),
            }
        return found


async def one_round(targets: Sequence[Target], asked: Asked, options: argparse.Namespace) -> Round:
    closed = await measure(targets, Load("closed", CLIENTS), options.seconds, asked)
    load = Load("open", options.share * closed.requests_per_s, options.share)
    below = await measure(targets, load, options.seconds, asked.other())
    return Round(asked, closed, below, os.getloadavg()[0])


def summary(p: Point) -> dict[str, float]:
    assert p.ttft
    assert p.itl
    return {
        "ttft_p50_ms": p.ttft.p50 * 1e3,
        "ttft_p90_ms": p.ttft.p90 * 1e3,
        "itl_p50_ms": p.itl.p50 * 1e3,
        "tokens_per_s": p.tokens_per_s,
        "hit_rate": p.cached_tokens / max(p.prompt_tokens, 1),
        "failed": sum(p.failed.values()) + p.rejected,
        "client_cpu": p.client_cpu,
    }


def errors(rounds: Sequence[dict[str, Any]], loop: str) -> dict[str, float]:
    """Return predicted / measured - 1 for the median of each figure over all rounds.

    Of the hit rate it is predicted - measured: a trace may have no prompts with a common prefix.
    """
    found = {}
    for name in ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "tokens_per_s", "hit_rate"):
        measured, predicted = (
            statistics.median(each[loop][kind][name] for each in rounds)
            for kind in ("measured", "predicted")
        )
        found[name] = predicted - measured if name == "hit_rate" else predicted / measured - 1
    return found


async def check(
    chosen: Workload, options: argparse.Namespace
) -> tuple[dict[str, Any], FittedReplica]:
    flags = [
        *("--block-size", str(CONFIG.block_size), "--threads", str(CONFIG.threads)),
        *("--num-gpu-blocks-override", str(CONFIG.num_gpu_blocks_override), "--no-access-log"),
        *("--speculation", "off"),  # the simulation has no text to draft from
    ]
    calibration, rounds = Calibration(chosen), []
    with ExitStack() as stack:
        servers = [stack.enter_context(Penstock(CONFIG.model, flags)) for _ in range(REPLICAS)]
        targets = [Target.parse(server.address) for server in servers]
        for number in range(options.rounds):
            await calibration.take(targets, options.calibration_seconds, number)
            rounds.append(await one_round(targets, Asked(chosen, number), options))
            print(f"round {number}: {summary(rounds[-1].closed)}", flush=True)
        await calibration.take(targets, options.calibration_seconds, options.rounds)
    blocks = CONFIG.num_gpu_blocks_override or 0
    step_time = fit(calibration.runs, calibration.ttft)
    fitted = FittedReplica(CONFIG, blocks, MAX_MODEL_LEN, STEP_TOKENS, step_time)
    figures = [each.figures(fitted, options.seconds) for each in rounds]
    return {
        "command": f"python -m loadtest.simulator_check {Path(options.workload).name} "
        f"--rounds {options.rounds} --seconds {options.seconds:g} --share {options.share:g}",
        "date": time.strftime("%Y-%m-%d"),
        "cpu_count": os.cpu_count(),
        "workload": chosen.name,
        "step_time": msgspec.to_builtins(step_time),
        "error_of_medians": {loop: errors(figures, loop) for loop in ("closed", "open")},
        "rounds": figures,
    }, fitted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("workload", help="the Mooncake trace, or any --workload of `penstock bench run`")
    add("--rounds", type=int, default=6)
    add("--seconds", type=float, default=12.0, help="duration of each of the two loads")
    add("--calibration-seconds", type=float, default=4.0, help="duration of each calibration load")
    add(
        "--share",
        type=float,
        default=0.7,
        help="rate of the open loop, as a share of the closed loop's rate",
    )
    add("--json", type=Path, help="write the figures to this file")
    add("--save", type=Path, help="write the fitted replica to this file, for loadtest.simulate")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    scale = SCALE if Path(options.workload).is_file() else Scale()
    try:
        chosen = workload(options.workload, scale, MAX_MODEL_LEN - 1)
    except BenchError as error:
        sys.exit(f"simulator_check: {error}")
    report, fitted = asyncio.run(check(chosen, options))
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(fitted)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for loop, found in report["error_of_medians"].items():
        print(f"{loop}: {', '.join(f'{name} {error:+.1%}' for name, error in found.items())}")


if __name__ == "__main__":
    main()
