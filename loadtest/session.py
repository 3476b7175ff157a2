"""One `penstock bench run`, from its options to its report, with progress on stderr."""

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
    """The options of the command, as given."""

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
    """Measure all loads and return the report.

    If it is cancelled or an error occurs after the first load, the report has the loads that have
    ended. Raises BenchError if nothing can be measured.
    """
    loads, scale = _loads(asked), Scale.parse(asked.length_scale)
    slo = Slo.parse(asked.slo) if asked.slo else None
    if not (asked.key.isascii() and asked.key.isprintable()):
        raise BenchError(
            "The API key has characters that an HTTP header cannot carry; only printable ASCII is "
            "allowed in --api-key and PENSTOCK_API_KEY."
        )
    target = Target.parse(asked.url, asked.key)
    model, longest = await find(target, asked.url, asked.model)
    chosen = workload(asked.workload, scale, longest)
    as_recorded = asked.arrivals == "recorded"
    if as_recorded and chosen.gaps is None:
        raise BenchError(
            f"--arrivals recorded: {asked.workload} is not a trace with arrival times. Give a "
            "trace, or use --arrivals poisson."
        )
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
        # Saturation is measured in every round, because other work may slow the machine down.
        if any(load.share is not None for load in loads):
            now = _from_shares(loads, await run.saturation(number))
        for load in now:
            points.append(await run.measure(load, number))
            _show_point(points[-1], rounds)


def _loads(asked: Asked) -> list[Load]:
    """Parse the loads, closed loops first. The value of a share of saturation is not known yet."""
    loads = []
    for text in filter(None, asked.concurrency.split(",")):
        if not text.strip().isdecimal() or len(text.strip()) > 5 or int(text) < 1:
            raise BenchError(
                f"--concurrency: {text!r} is not a number of clients from 1 to 99999; give numbers "
                "as 1,8,32."
            )
        loads.append(Load("closed", int(text)))
    for text in filter(None, asked.rate.split(",")):
        try:
            value = float(text.strip().removesuffix("%"))
        except ValueError:
            value = 0.0
        if not 0 < value < 1e6:
            raise BenchError(
                f"--rate: {text!r} is not a number of requests/s; give rates as 2,4 or 50%,120%."
            )
        share = value / 100 if text.strip().endswith("%") else None
        loads.append(Load("open", value, share))
    if not loads:
        raise BenchError("No load is given; pass --concurrency as 1,8,32 or --rate as 2,4.")
    return loads


def _from_shares(loads: list[Load], saturation: Point) -> list[Load]:
    if not saturation.completed:
        kinds = ", ".join(saturation.messages.values())
        raise BenchError(f"No request succeeded while saturation was measured. {kinds}")
    if not saturation.tokens_per_s:
        raise BenchError(
            f"No token arrived within {saturation.seconds:g} s while saturation was measured. "
            "Measure longer with --seconds."
        )
    # Derived from tokens, because few requests may both begin and end within the measured seconds.
    each = saturation.output_tokens / saturation.completed
    rate = saturation.tokens_per_s / each
    _line(f"saturation: {saturation.load} reach {rate:.3g} req/s")
    return [
        replace(load, value=load.share * rate) if load.share is not None else load for load in loads
    ]


def show_progress(now: Progress) -> None:
    """Show progress in one line that is overwritten; show nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return
    left = now.seconds - now.elapsed
    state = f"{left:.0f} s left" if left > 0 else "waiting for the last requests"
    sys.stderr.write(
        f"\r\x1b[K{now.load}, round {now.round}: {now.ended} ended, {now.running} running, {state}"
    )
    sys.stderr.flush()


def _show_point(point: Point, rounds: int) -> None:
    of_rounds = f" (round {point.round} of {rounds})" if rounds > 1 else ""
    failed = "".join(f", {count} {kind}" for kind, count in point.failed.items())
    ttft = f", ttft p50 {point.ttft.p50 * 1e3:.0f} ms" if point.ttft else ""
    _line(
        f"{point.load}{of_rounds}: {point.completed} of {point.requests} completed, "
        f"{point.tokens_per_s:.0f} tokens/s{ttft}, {point.rejected} rejected{failed}"
    )


def _line(text: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}{text}\n")
    sys.stderr.flush()
