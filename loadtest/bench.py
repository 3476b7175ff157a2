"""`penstock bench run`: closed loops at given concurrencies, open loops at given rates.

A closed loop has a fixed number of clients. Each client sends its next request when its last one is
answered. This finds the throughput, but hides a slow server's queue, because slow answers slow the
clients down.

An open loop sends requests at times drawn in advance (Poisson), independently of the server. It
measures latency from these times, as users experience it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtest.errors import BenchError
from loadtest.http_client import Completion, Target, exchange, said, stream
from loadtest.measure import Load, Measured, Point, Slo, point
from loadtest.schedule import FULL_LENGTH
from loadtest.workload import WORDS, Prose, Workload, poisson

Api = Literal["chat", "completions"]
Arrivals = Literal["poisson", "recorded"]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROBE_WORDS = (24, 96)
SATURATION_CLIENTS = 64
BACK_OFF_S = 1.0  # pause of a closed loop's client after a failure or a rejection


@dataclass(frozen=True, slots=True)
class Server:
    """One model of a server, and the settings of requests to it."""

    target: Target
    url: str
    model: str
    api: Api
    ignore_eos: bool
    timeout: float

    def request(self, text: str, tokens: int) -> tuple[str, dict[str, Any]]:
        """Return (path, body) of a request for `tokens` output tokens."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": tokens, "temperature": 0}
        if self.ignore_eos:
            body |= FULL_LENGTH
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        return PATHS[self.api], body

    async def ask(self, text: str, tokens: int) -> Completion:
        path, body = self.request(text, tokens)
        return await stream(self.target, path, body, self.timeout)


async def find(target: Target, url: str, model: str | None) -> tuple[str, int | None]:
    """Return (model, its context length or None if the server does not report it).

    Raises BenchError if the server does not answer or does not have the model.
    """
    this = await exchange(target, "/v1/models", None, limit_s=10)
    if this.error in ("no connection", "timeout", "not HTTP"):
        raise BenchError(
            f"No server answers at {url} ({this.message}). Start one with `penstock serve`, or "
            "name another with --url."
        )
    if this.status == 404 and model:
        return model, None  # the server lists no models; the first request shows if it has this one
    if this.error:
        hint = " Give the key with PENSTOCK_API_KEY." if this.status == 401 else ""
        hint = " Give the model with --model." if this.status == 404 else hint
        raise BenchError(f"{url} answered {this.status}: {said(this.body)}{hint}")
    try:
        entries = {entry["id"]: entry for entry in json.loads(this.body)["data"]}
        chosen = model or next(iter(entries))
    except (ValueError, LookupError, TypeError, StopIteration):
        raise BenchError(f"{url}/v1/models lists no models; is it the right URL?") from None
    if chosen not in entries:
        raise BenchError(f"The server has no model {chosen}; available: {', '.join(entries)}.")
    return chosen, entries[chosen].get("max_model_len")


async def calibrate(server: Server) -> Prose:
    """Measure the tokens per word with two short prompts, which also warm the server up.

    Raises BenchError if a request fails or the server reports no usage.
    """
    sizes = []
    rng = random.Random("calibration")
    for words in PROBE_WORDS:
        done = await server.ask(" ".join(rng.choices(WORDS, k=words)), tokens=4)
        if done.error:
            hint = ""
            if "ignore_eos" in done.message:
                hint = " Omit the field with --no-ignore-eos."
            elif server.api == "chat" and "template" in done.message:
                hint = " Use plain completions with --api completions."
            status = f"{done.status}: " if done.status else f"{done.error}: "
            raise BenchError(f"The calibration request failed: {status}{done.message}{hint}")
        sizes.append(done.prompt_tokens)
    few, many = PROBE_WORDS
    if sizes[1] <= sizes[0]:
        raise BenchError(
            "The server's streams end without a usage event, so the length of prompts in tokens "
            "is unknown. The server must support stream_options.include_usage."
        )
    per_word = (sizes[1] - sizes[0]) / (many - few)
    return Prose(per_word, sizes[0] - few * per_word)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of the measurement of one point."""

    load: Load
    round: int
    elapsed: float
    seconds: float
    running: int
    ended: int


@dataclass
class Run:
    """Measures points of one workload on one server.

    With `as_recorded`, arrivals follow the workload's trace instead of a Poisson process.
    """

    server: Server
    prose: Prose
    workload: Workload
    seconds: float
    seed: int
    slo: Slo | None
    report: Callable[[Progress], None]
    as_recorded: bool
    _measured: list[Measured] = field(default_factory=list, init=False)
    _running: int = field(default=0, init=False)

    async def measure(self, load: Load, round_number: int, *, purpose: str = "") -> Point:
        """Apply `load` to the server for the run's seconds, and wait for all requests sent then."""
        # Each point gets different prompts, so that none hits a prefix cached for another point.
        # The seed has the share of saturation and not its rate, which differs between runs.
        asked = load.value if load.share is None else load.share
        rng = random.Random(f"{self.seed} {round_number} {load.loop} {asked:.6g} {purpose}")
        self._measured = []
        begin, cpu = time.monotonic(), time.process_time()
        watch = asyncio.create_task(self._watch(load, round_number, begin))
        try:
            drive = self._closed if load.loop == "closed" else self._open
            await drive(load, begin, rng)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        busy = (time.process_time() - cpu) / (time.monotonic() - begin)
        window = (begin, begin + self.seconds)
        return point(load, round_number, window, self._measured, self.slo, busy)

    async def saturation(self, round_number: int) -> Point:
        """Measure saturation, the highest request rate, with a closed loop of many clients."""
        return await self.measure(
            Load("closed", SATURATION_CLIENTS), round_number, purpose="saturation"
        )

    async def _closed(self, load: Load, begin: float, rng: random.Random) -> None:
        texts = self.prose.texts(self.workload, rng)

        async def client() -> None:
            while time.monotonic() < begin + self.seconds:
                text, tokens = next(texts)
                if (await self._ask(text, tokens, None)).error:
                    # Without a pause, rejections would take up all of the server's time.
                    await asyncio.sleep(BACK_OFF_S)

        await asyncio.gather(*(client() for _ in range(int(load.value))))

    async def _open(self, load: Load, begin: float, rng: random.Random) -> None:
        texts, at = self.prose.texts(self.workload, rng), begin
        recorded = self.workload.gaps if self.as_recorded else None
        async with asyncio.TaskGroup() as group:
            for gap in recorded() if recorded else poisson(rng):
                at += gap / load.value
                if at >= begin + self.seconds:
                    break
                text, tokens = next(texts)
                await asyncio.sleep(at - time.monotonic())
                group.create_task(self._ask(text, tokens, at))

    async def _ask(self, text: str, tokens: int, intended: float | None) -> Completion:
        self._running += 1
        try:
            done = await self.server.ask(text, tokens)
        finally:
            self._running -= 1
        self._measured.append(Measured(done, done.started if intended is None else intended))
        return done

    async def _watch(self, load: Load, round_number: int, begin: float) -> None:
        while True:
            await asyncio.sleep(0.5)
            elapsed = time.monotonic() - begin
            ended = len(self._measured)
            progress = Progress(load, round_number, elapsed, self.seconds, self._running, ended)
            self.report(progress)


def allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard limit.

    Past saturation, every queued request holds a socket.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
