"""Measure the work of a replica's processes and of a client, under loads of known steps.

Prompts without decodes and decodes without prompts are measured apart, so that the numbers of
steps, tokens and contexts are known. The lengths are those of no trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.http_client import Exchange, Target, drive, exchange, streamed
from loadtest.schedule import Ask
from loadtest.servers import Server
from loadtest.step_time import (
    Interval,
    RequestTime,
    StepTime,
    fit_channel,
    fit_requests,
    fit_steps,
)

PROMPTS = (16, 64, 200, 0.9)  # tokens; a fraction is a share of the longest sequence
PROMPT_CLIENTS = (1, 4)
DECODES = (1, 2, 4, 8, 9, 16, 32)  # numbers of decodes; up to 8 are recorded on a CPU
CONTEXTS = (16, 0.4)
# These decodes run while the API process is stopped half of the time, so that it reads several
# messages at once.
PAUSED = (1, 8, 32)
PAUSE_S = 0.02
# Clients pause between these prompts, so that the cores are idle most of the time.
PACED, BETWEEN_S = (64, 200), 0.05
# Of an interval. It is repeated with twice the time if a server takes fewer steps.
PROMPT_SECONDS, DECODE_SECONDS, STEPS = 0.7, 0.4, 10
POLL_S = 0.03


@dataclass(frozen=True, slots=True)
class Scrape:
    """Counters of one server at the time `at`, in seconds; `context` is a gauge, in tokens."""

    at: float
    steps: float
    prefill: float  # prompt tokens computed, without those found in the prefix cache
    context: float
    requests: float  # that have their first token
    tokens: float  # generated
    running: float  # a gauge

    @classmethod
    def parse(cls, at: float, exposition: str) -> Scrape:
        samples: dict[str, float] = {}
        shape: dict[str, str] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                samples[sample.name.removeprefix("penstock:")] = sample.value
                if sample.name == "penstock:cache_config_info":
                    shape = sample.labels
        blocks, size = int(shape["num_gpu_blocks"]), int(shape["block_size"])
        return cls(
            at=at,
            steps=samples["engine_step_seconds_count"],
            prefill=samples["prefix_cache_queries_total"] - samples["prefix_cache_hits_total"],
            context=samples["kv_cache_usage_perc"] * blocks * size,
            requests=samples["request_prefill_time_seconds_count"],
            tokens=samples["generation_tokens_total"],
            running=samples["num_requests_running"],
        )


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU seconds of the engines, of the API processes and of this process at a time.

    `channels` are the threads that serve the socket between both. The others contain them, too.
    The wakes are how often a process has gone to sleep, as each time it is woken again.
    """

    at: float
    engines: list[float]
    apis: list[float]
    channels: list[tuple[float, float]]  # of the engine and of the API process
    client: float
    api_wakes: list[int]
    client_wakes: int

    @classmethod
    def now(cls, servers: Sequence[Calibrated]) -> Cpu:
        return cls(
            at=time.monotonic(),
            engines=[cpu_seconds(server.engine) for server in servers],
            apis=[cpu_seconds(server.api) for server in servers],
            channels=[
                (channel_seconds(server.engine), channel_seconds(server.api)) for server in servers
            ],
            client=time.process_time(),
            api_wakes=[wakes(server.api) for server in servers],
            client_wakes=wakes(psutil.Process()),
        )


@dataclass(frozen=True)
class Calibrated:
    """A server to measure."""

    target: Target
    api: psutil.Process
    engine: psutil.Process

    @classmethod
    def of(cls, server: Server) -> Calibrated:
        api = psutil.Process(server.process.pid)
        engines = [child for child in api.children() if "engine.process" in child.cmdline()]
        [engine] = engines
        return cls(Target.parse(server.address), api, engine)

    async def scrape(self) -> Scrape:
        began = time.monotonic()
        this = await exchange(self.target, "/metrics", None, limit_s=30)
        return Scrape.parse((began + time.monotonic()) / 2, this.body.decode())

    async def until_begun(self, requests: float) -> None:
        """Wait until this number of requests have their first token."""
        begun = 0.0
        while begun < requests:
            await asyncio.sleep(POLL_S)
            begun = (await self.scrape()).requests


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def wakes(process: psutil.Process) -> int:
    """Return how often the process's main thread has gone to sleep."""
    return int(process.num_ctx_switches().voluntary)


def channel_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of zmq's thread, which writes to the socket and reads from it."""
    nanoseconds = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            if (task / "comm").read_text().startswith("ZMQbg/IO"):
                nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


@dataclass
class Calibration:
    """Intervals of all servers, which are under the same load at the same time."""

    vocabulary: range
    longest: int  # tokens of prompt and answer
    rng: random.Random  # of the prompts, which no other calibration has
    intervals: list[Interval] = field(default_factory=list)
    # Of the client, which serves all servers: their sums, and its CPU seconds.
    together: list[Interval] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    # Requests of the current load, by server.
    _exchanges: defaultdict[Target, list[Exchange]] = field(
        init=False, default_factory=lambda: defaultdict(list)
    )

    async def take(self, servers: Sequence[Calibrated]) -> None:
        """Run all loads once."""
        for prompt in PROMPTS:
            for clients in PROMPT_CLIENTS:
                await self._prompts(servers, self._tokens(prompt), clients)
        for context in CONTEXTS:
            for count in DECODES:
                await self._decodes(servers, self._tokens(context), count)
        for count in PAUSED:
            await self._decodes(servers, self._tokens(CONTEXTS[0]), count, paused=True)
        for prompt in PACED:
            await self._prompts(servers, prompt, 1, paced=True)

    def joined(self, other: Calibration) -> Calibration:
        """Return a calibration with the intervals of both."""
        return replace(
            self,
            intervals=self.intervals + other.intervals,
            together=self.together + other.together,
            client_cpu=self.client_cpu + other.client_cpu,
        )

    def step_time(self, threads: int) -> StepTime:
        return fit_steps(self.intervals, threads)

    def api_time(self) -> RequestTime:
        return fit_requests(self.intervals, [each.api_cpu for each in self.intervals])

    def client_time(self) -> RequestTime:
        return fit_requests(self.together, self.client_cpu)

    def channel_time(self) -> float:
        return fit_channel(self.intervals)

    def _tokens(self, length: float) -> int:
        return round(length * self.longest) if length < 1 else int(length)

    def _ask(self, prompt: int, output: int) -> Ask:
        return Ask(0.0, self.rng.choices(self.vocabulary, k=prompt), output)

    async def _stream(self, server: Calibrated, ask: Ask) -> None:
        this = Exchange(server.target, "/v1/completions", streamed(ask.body))
        self._exchanges[server.target].append(this)
        await drive(this, server.target)

    def _events(self, servers: Sequence[Calibrated]) -> list[int]:
        return [sum(this.events for this in self._exchanges[s.target]) for s in servers]

    async def _prompts(
        self, servers: Sequence[Calibrated], length: int, clients: int, *, paced: bool = False
    ) -> None:
        """Prompts of `length` tokens with answers of one token: no step has a decode."""
        self._exchanges.clear()

        async def client(server: Calibrated) -> None:
            while True:
                await self._stream(server, self._ask(length, 1))
                if paced:  # not all at once
                    await asyncio.sleep(self.rng.uniform(0.5, 1.5) * BETWEEN_S)

        async with running(client(server) for server in servers for _ in range(clients)):
            await asyncio.sleep(DECODE_SECONDS / 3)  # until all clients have sent a request
            await self._interval(servers, 0, length, paced=paced)

    async def _decodes(
        self, servers: Sequence[Calibrated], context: int, count: int, *, paused: bool = False
    ) -> None:
        """Let `count` sequences decode, each behind `context` tokens; all have begun before."""
        self._exchanges.clear()
        output = self.longest - context - 1

        async def client(server: Calibrated) -> None:
            await self._stream(server, self._ask(context, output))

        before = [await server.scrape() for server in servers]
        async with running(client(server) for server in servers for _ in range(count)):
            for server, old in zip(servers, before, strict=True):
                await server.until_begun(old.requests + count)
            await self._interval(servers, count, context, paused=paused)

    async def _interval(
        self,
        servers: Sequence[Calibrated],
        decodes: int,
        length: int,
        *,
        paused: bool = False,
        paced: bool = False,
    ) -> None:
        """Add what the servers do from now on, unless the number of decodes changes meanwhile.

        CPU times are those between the scrapes, which take milliseconds themselves.
        """
        seconds = DECODE_SECONDS if decodes else PROMPT_SECONDS
        steps = 0.0
        while steps < STEPS:
            before = [await server.scrape() for server in servers]
            begin, earlier = Cpu.now(servers), self._events(servers)
            if paused:
                await pauses([server.api for server in servers], seconds)
            else:
                await asyncio.sleep(seconds)
            end, later = Cpu.now(servers), self._events(servers)
            after = [await server.scrape() for server in servers]
            pairs = list(zip(before, after, strict=True))
            steps = min(new.steps - old.steps for old, new in pairs)
            seconds *= 2
        changed = any(new.running != decodes or new.requests != old.requests for old, new in pairs)
        if decodes and changed:
            return
        found = [
            interval(number, pair, (begin, end), (earlier, later), decodes, length, paced=paced)
            for number, pair in enumerate(pairs)
        ]
        self.intervals += found
        self.together.append(total(found, end.client_wakes - begin.client_wakes))
        self.client_cpu.append(end.client - begin.client)


@asynccontextmanager
async def running(clients: Iterable[Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run clients until the context ends; their requests are then aborted."""
    tasks = [asyncio.create_task(client) for client in clients]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pauses(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Stop processes for PAUSE_S, let them run for as long, and so on for `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            for process in processes:
                process.suspend()
            await asyncio.sleep(PAUSE_S)
        finally:
            for process in processes:
                process.resume()
        await asyncio.sleep(PAUSE_S)


def interval(
    number: int,
    scrapes: tuple[Scrape, Scrape],
    cpu: tuple[Cpu, Cpu],
    events: tuple[Sequence[int], Sequence[int]],
    decodes: int,
    length: int,
    *,
    paced: bool = False,
) -> Interval:
    """Return what server `number` did between two readings of CPU times, under a steady load."""
    before, after = scrapes
    begin, end = cpu
    share = (end.at - begin.at) / (after.at - before.at)
    readings = zip(begin.channels[number], end.channels[number], strict=True)
    channels = [new - old for old, new in readings]
    prefill = share * (after.prefill - before.prefill)
    return Interval(
        decodes=decodes,
        steps=share * (after.steps - before.steps),
        wakes=end.api_wakes[number] - begin.api_wakes[number],
        paced=paced,
        prefill=prefill,
        context=(before.context + after.context) / 2,
        attended=prefill * length / 2,
        requests=share * (after.requests - before.requests),
        tokens=share * (after.tokens - before.tokens),
        events=events[1][number] - events[0][number],
        engine_cpu=end.engines[number] - begin.engines[number] - channels[0],
        api_cpu=end.apis[number] - begin.apis[number] - channels[1],
        channel_cpu=sum(channels),
    )


def total(intervals: Sequence[Interval], wakes: float) -> Interval:
    """Return the work of a client of several servers. They send it no messages, but events."""
    sums = {
        name: sum(getattr(each, name) for each in intervals)
        for name in ("prefill", "requests", "tokens", "events")
    }
    return msgspec.structs.replace(intervals[0], steps=0.0, wakes=wakes, **sums)
