"""One `penstock bench run` from its options to its report, with its progress on stderr."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from dataclasses import dataclass

from msgspec.structs import replace

from loadtest.bench import (
    Api,
    Arrivals,
    Progress,
    Run,
    Server,
    allow_many_connections,
    calibrate,
    find,
)
from loadtest.errors import BenchError
from loadtest.http_client import Target
from loadtest.measure import Load, Point, Slo
from loadtest.report import Report
from loadtest.workload import Scale, workload


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command, as they were given."""

    url: str
    key: str
    model: str | None
    api: Api
    concurrency: str
    rate: str
    workload: str
    length_scale: str
    arrivals: Arrivals
    slo: str | None
    seconds: float
    rounds: int
    seed: int
    ignore_eos: bool
    timeout: float


async def measure(asked: Asked) -> Report:
    """Raises BenchError where nothing can be measured. Cancelled, or where nothing can be any more,
    it returns what it has."""
    loads, scale = _loads(asked), Scale.parse(asked.length_scale)
    slo = Slo.parse(asked.slo) if asked.slo else None
    if not (asked.key.isascii() and asked.key.isprintable()):
        raise BenchError("The API key has characters that no header can carry; see --api-key.")
    target = Target.parse(asked.url, asked.key)
    model, longest = await find(target, asked.url, asked.model)
    chosen = workload(asked.workload, scale, longest)
    as_recorded = asked.arrivals == "recorded"
    if as_recorded and chosen.gaps is None:
        raise BenchError(f"--arrivals recorded: {asked.workload} is no trace with arrivals.")
    server = Server(target, asked.url, model, asked.api, asked.ignore_eos, asked.timeout)
    prose = await calibrate(server)
    run = Run(server, prose, chosen, asked.seconds, asked.seed, slo, show_progress, as_recorded)
    allow_many_connections()
    points: list[Point] = []
    stopped = ""
    try:
        await _measure_all(run, loads, asked.rounds, points)
    except (asyncio.CancelledError, BenchError) as error:
        if not points:
            raise
        stopped = str(error) or "stopped by a signal"
        _line(stopped)
    return Report(
        version=1,
        command="penstock " + " ".join(sys.argv[1:]),
        date=time.strftime("%Y-%m-%d %H:%M"),
        url=asked.url,
        model=model,
        api=asked.api,
        workload=chosen.name,
        arrivals=asked.arrivals,
        left_out=chosen.left_out,
        seed=asked.seed,
        tokens_per_word=prose.tokens_per_word,
        slo=slo,
        client={
            "cores": float(os.cpu_count() or 0),
            "load average": round(os.getloadavg()[0], 2),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        points=points,
        stopped=stopped,
    )


async def _measure_all(run: Run, loads: list[Load], rounds: int, points: list[Point]) -> None:
    for number in range(1, rounds + 1):
        now = loads
        if any(load.share is not None for load in loads):  # anew: the machine may have others' work
            now = _from_shares(loads, await run.saturation(number))
        for load in now:
            points.append(await run.measure(load, number))
            _show_point(points[-1], rounds)


def _loads(asked: Asked) -> list[Load]:
    """Closed ones first; of a share of saturation the value is not known yet."""
    loads = []
    for text in filter(None, asked.concurrency.split(",")):
        if not text.strip().isdecimal() or len(text.strip()) > 5 or int(text) < 1:
            raise BenchError(f"--concurrency: {text!r} is no number of clients; give it as 1,8,32.")
        loads.append(Load("closed", int(text)))
    for text in filter(None, asked.rate.split(",")):
        try:
            value = float(text.strip().removesuffix("%"))
        except ValueError:
            value = 0.0
        if not 0 < value < 1e6:
            raise BenchError(
                f"--rate: {text!r} is no number of requests/s; give it as 2,4 or as 50%,120%."
            )
        share = value / 100 if text.strip().endswith("%") else None
        loads.append(Load("open", value, share))
    if not loads:
        raise BenchError("No load is given; give --concurrency as 1,8,32 or --rate as 2,4.")
    return loads


def _from_shares(loads: list[Load], saturation: Point) -> list[Load]:
    if not saturation.completed:
        kinds = ", ".join(saturation.messages.values())
        raise BenchError(f"No request was answered while saturation was looked for. {kinds}")
    if not saturation.tokens_per_s:
        raise BenchError(
            f"No token came within {saturation.seconds:g} s while saturation was looked for. "
            "Measure longer, with --seconds."
        )
    # By tokens: few requests may both begin and end within the seconds of the measurement.
    each = saturation.output_tokens / saturation.completed
    rate = saturation.tokens_per_s / each
    _line(f"saturation: {saturation.load} reach {rate:.3g} req/s")
    return [
        replace(load, value=load.share * rate) if load.share is not None else load for load in loads
    ]


def show_progress(now: Progress) -> None:
    """One line that is overwritten; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        return
    left = now.seconds - now.elapsed
    state = f"{left:.0f} s to go" if left > 0 else "waiting for the last ones"
    sys.stderr.write(
        f"\r\x1b[K{now.load}, round {now.round}: {now.ended} ended, {now.running} running, {state}"
    )
    sys.stderr.flush()


def _show_point(point: Point, rounds: int) -> None:
    of_rounds = f" (round {point.round} of {rounds})" if rounds > 1 else ""
    failed = "".join(f", {count} {kind}" for kind, count in point.failed.items())
    ttft = f", ttft p50 {point.ttft.p50 * 1e3:.0f} ms" if point.ttft else ""
    _line(
        f"{point.load}{of_rounds}: {point.completed} of {point.requests} whole, "
        f"{point.tokens_per_s:.0f} tokens/s{ttft}, {point.rejected} rejected{failed}"
    )


def _line(text: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}{text}\n")
    sys.stderr.flush()
