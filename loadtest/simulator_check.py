"""Check the accuracy of the simulator: compare two real replicas with their prediction.

A round is a closed loop, and an open loop below saturation. A calibration
(`loadtest/calibration.py`) runs before and after each loop. It uses no request of the workload, so
the fit knows nothing of it. These two predict the loop, because the speed of rented and shared
cores changes from minute to minute. The medians over the rounds are compared.

Both replicas and the client run on the same cores, as they do in the simulation. A round is
repeated if other programs took more than a tenth of a core. The simulation has the cores that they
left.

    python -m loadtest.simulator_check conversation_trace.jsonl --json FIGURES --save MODEL.json
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from deploy.ray.policies import POLICIES, Policy, prefix_hashes
from engine.assembly import COPIED_PART
from engine.config import EngineConfig
from engine.memory.model_plan import ModelPlan
from loadtest.calibration import Calibrated, Calibration, Cpu
from loadtest.errors import BenchError
from loadtest.http_client import Target, stream
from loadtest.measure import Load, Measured, Point, point
from loadtest.program import run_program
from loadtest.schedule import DEMO_VOCABULARY, Ask, asks, timetable
from loadtest.servers import Penstock
from loadtest.simulation import Clients, FittedReplica, Simulation, Work
from loadtest.step_time import RequestTime
from loadtest.workload import Scale, Workload, workload

REPLICAS = 2
# One thread per replica, so that no replica spins on the other's core. The simulation has no text
# to draft from.
CONFIG = EngineConfig(
    block_size=16, num_gpu_blocks_override=4096, max_model_len=1024, threads=1, speculation="off"
)
SCALE = "0.03125"  # a block of the Mooncake trace becomes a KV block
POLICY = "prefix"
CLIENTS = 16  # clients of the closed loop
WARM_UP_S = 4.0
MOST_DISTURBED = 6  # rounds that are repeated


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


@dataclass(frozen=True)
class Run:
    """A load on the real replicas: what it measured, and the work of all processes."""

    asked: Asked
    point: Point
    work: Work
    others: float  # cores that other programs used


async def measure(servers: Sequence[Calibrated], load: Load, seconds: float, asked: Asked) -> Run:
    """Measure `load` on the real replicas."""
    router = Router([server.target for server in servers])
    plan = asked.timetable(load.value, seconds) if load.loop == "open" else []
    machine, before = machine_seconds(), Cpu.now(servers)
    if load.loop == "open":
        await router.open_loop(plan, before.at)
    else:
        await router.closed_loop(asked.endless(), int(load.value), before.at + seconds)
    work = work_between(before, after := Cpu.now(servers))
    duration = after.at - before.at
    own = work.engines + work.apis + work.client
    window = before.at, before.at + seconds
    return Run(
        asked,
        point(load, 1, window, router.measured, None, work.client / duration),
        work,
        max(0.0, machine_seconds() - machine - own) / duration,
    )


def machine_seconds() -> float:
    """Return the CPU seconds of the machine, with those that its hypervisor gave to others."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def work_between(before: Cpu, after: Cpu) -> Work:
    return Work(
        engines=sum(after.engines) - sum(before.engines),
        apis=sum(after.apis) - sum(before.apis),
        client=after.client - before.client,
    )


def predict(
    fitted: FittedReplica, client: RequestTime, run: Run, seconds: float
) -> tuple[Point, Work]:
    """Simulate the load of `run` on the cores that it had."""
    load, asked = run.point.load, run.asked
    clients = Clients(fitted.cores - run.others, client)
    simulation = Simulation(fitted, REPLICAS, POLICIES[POLICY](), clients)
    if load.loop == "open":
        measured = simulation.open_loop(asked.timetable(load.value, seconds))
    else:
        measured = simulation.closed_loop(asked.endless(), int(load.value), seconds)
    return point(load, 1, (0.0, seconds), measured, None, 0.0), simulation.worked


@dataclass
class Rounds:
    """Measures rounds, with a calibration before and after each loop."""

    servers: Sequence[Calibrated]
    config: EngineConfig
    options: argparse.Namespace
    # Each loop with the calibrations before and after it.
    done: list[list[tuple[Run, Calibration]]] = field(default_factory=list)
    disturbed: int = 0  # rounds in which other programs used the cores
    calibrations: list[Calibration] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def measure(self, chosen: Workload) -> None:
        """Measure rounds until enough of them count."""
        # The first steps of a size take longer.
        await measure(self.servers, Load("closed", CLIENTS), WARM_UP_S, Asked(chosen, -1))
        await self._calibrate()
        while len(self.done) < self.options.rounds:
            asked = Asked(chosen, len(self.done) + self.disturbed)
            pairs = await self._round(asked)
            first, _ = pairs[0]
            print(f"round {asked.seed}: {summary(first.point, first.work)}", flush=True)
            others = max(run.others for run, _ in pairs)
            if others <= self.options.most_others or self.disturbed == MOST_DISTURBED:
                self.done.append(pairs)
            else:
                self.disturbed += 1
                print("Other programs used the cores: the round does not count.", flush=True)

    async def _round(self, asked: Asked) -> list[tuple[Run, Calibration]]:
        """Measure a closed loop, and an open loop of a share of its rate."""
        closed = await self._run(Load("closed", CLIENTS), asked)
        share = self.options.share
        load = Load("open", share * closed[0].point.requests_per_s, share)
        return [closed, await self._run(load, asked.other())]

    async def _run(self, load: Load, asked: Asked) -> tuple[Run, Calibration]:
        run = await measure(self.servers, load, self.options.seconds, asked)
        await self._calibrate()
        before, after = self.calibrations[-2:]
        return run, before.joined(after)

    async def _calibrate(self) -> None:
        calibration = Calibration(DEMO_VOCABULARY, self.config.max_model_len or 0, self._rng)
        await calibration.take(self.servers)
        self.calibrations.append(calibration)


def compare(
    config: EngineConfig, pairs: Sequence[tuple[Run, Calibration]], seconds: float
) -> dict[str, Any]:
    """Return the measured and the predicted figures of the same requests, for each loop."""
    found: dict[str, Any] = {}
    for run, calibration in pairs:
        fitted = fitted_replica(config, calibration)
        foretold, work = predict(fitted, calibration.client_time(), run, seconds)
        found[run.point.load.loop] = {
            "load": str(run.point.load),
            "cores_of_other_programs": run.others,
            "measured": summary(run.point, run.work),
            "predicted": summary(foretold, work),
        }
    return found


def summary(p: Point, work: Work) -> dict[str, float]:
    assert p.ttft
    assert p.itl
    assert p.tpot
    return {
        "ttft_p50_ms": p.ttft.p50 * 1e3,
        "ttft_p90_ms": p.ttft.p90 * 1e3,
        "itl_p50_ms": p.itl.p50 * 1e3,
        "tpot_p50_ms": p.tpot.p50 * 1e3,
        "tokens_per_s": p.tokens_per_s,
        "hit_rate": p.cached_tokens / max(p.prompt_tokens, 1),
        "failed": sum(p.failed.values()) + p.rejected,
        "cpu_s_engines": work.engines,
        "cpu_s_apis": work.apis,
        "cpu_s_client": work.client,
    }


def errors(rounds: Sequence[dict[str, Any]], loop: str) -> dict[str, float]:
    """Return predicted / measured - 1 for the median of each figure over all rounds.

    Of the hit rate it is predicted - measured: a trace may have no prompts with a common prefix.
    """
    found = {}
    times = "ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "tpot_p50_ms"
    for name in (*times, "tokens_per_s", "hit_rate"):
        measured, predicted = (
            statistics.median(each[loop][kind][name] for each in rounds)
            for kind in ("measured", "predicted")
        )
        found[name] = predicted - measured if name == "hit_rate" else predicted / measured - 1
    return found


def fitted_replica(config: EngineConfig, calibration: Calibration) -> FittedReplica:
    """Return the replica that a server with `config` is, with the times of the calibration."""
    plan = ModelPlan(config)
    return FittedReplica(
        config=config,
        threads=plan.threads,
        num_blocks=config.num_gpu_blocks_override or 0,
        max_model_len=calibration.longest,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        context_cost=plan.context_cost,
        part_size=COPIED_PART,
        groups=tuple(plan.kv_groups),
        cores=os.cpu_count() or 1,
        step_time=calibration.step_time(plan.threads),
        api_time=calibration.api_time(),
        channel_time=calibration.channel_time(),
    )


async def check(
    chosen: Workload, options: argparse.Namespace
) -> tuple[dict[str, Any], FittedReplica]:
    config = msgspec.structs.replace(CONFIG, model=options.model)
    flags = [
        *("--block-size", str(config.block_size), "--threads", str(config.threads)),
        *("--num-gpu-blocks-override", str(config.num_gpu_blocks_override), "--no-access-log"),
        *("--max-model-len", str(config.max_model_len), "--speculation", config.speculation),
    ]
    with ExitStack() as stack:
        started = [stack.enter_context(Penstock(config.model, flags)) for _ in range(REPLICAS)]
        servers = [Calibrated.of(server) for server in started]
        rounds = Rounds(servers, config, options)
        await rounds.measure(chosen)
    calibration = functools.reduce(Calibration.joined, rounds.calibrations)
    fitted, client = fitted_replica(config, calibration), calibration.client_time()
    figures = [compare(config, pairs, options.seconds) for pairs in rounds.done]
    return {
        "command": f"python -m loadtest.simulator_check {Path(options.workload).name} "
        f"--length-scale {options.length_scale} --model {Path(options.model).name} "
        f"--rounds {options.rounds} --seconds {options.seconds:g} --share {options.share:g}",
        "date": time.strftime("%Y-%m-%d"),
        "cpu_count": os.cpu_count(),
        "workload": chosen.name,
        "disturbed_rounds": rounds.disturbed,
        "step_time": msgspec.to_builtins(fitted.step_time),
        "api_time": msgspec.to_builtins(fitted.api_time),
        "channel_time": fitted.channel_time,
        "client_time": msgspec.to_builtins(client),
        "error_of_medians": {loop: errors(figures, loop) for loop in ("closed", "open")},
        "rounds": figures,
    }, fitted


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    try:
        is_trace = Path(options.workload).is_file()
        scale = Scale.parse(options.length_scale) if is_trace else Scale()
        chosen = workload(options.workload, scale, (CONFIG.max_model_len or 0) - 1)
    except BenchError as error:
        sys.exit(f"simulator_check: {error}")
    report, fitted = asyncio.run(check(chosen, options))
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(fitted)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for loop, found in report["error_of_medians"].items():
        print(f"{loop}: {', '.join(f'{name} {error:+.1%}' for name, error in found.items())}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("workload", help="a trace, or any --workload of `penstock bench run`")
    add("--model", default=CONFIG.model, help="with a vocabulary of at least that of the demo")
    add("--length-scale", default=SCALE, help="factors for a trace, as for `penstock bench run`")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=12.0, help="duration of each of the two loads")
    add(
        "--share",
        type=float,
        default=0.7,
        help="rate of the open loop, as a share of the closed loop's rate",
    )
    add(
        "--most-others",
        type=float,
        default=0.1,
        help="repeat a round in which other programs used more cores",
    )
    add("--json", type=Path, help="write the figures to this file")
    add("--save", type=Path, help="write the fitted replica to this file, for loadtest.simulate")
    return parser.parse_args()


if __name__ == "__main__":
    run_program(main)
