"""How `make bench-peers` starts and measures each contender: with equal prompts and lengths."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from tokenizers import Tokenizer

from loadtest.http_client import Completion, Target, closed_loop, exchange, streamed
from loadtest.peers.environments import llama_server
from loadtest.servers import Penstock, Server

WORKER_S = 900


class Figures(NamedTuple):
    """One measurement of one contender. A value that was not measured is None."""

    rate: float  # output tokens/s of all streams together
    gap: float  # ms, median between a stream's tokens
    p99_gap: float  # ms
    ttft: float  # ms, median until the first token
    p99_ttft: float  # ms
    start: float | None = None  # s until the server is ready
    resident: float | None = None  # MB of all its processes, after start


@dataclass(frozen=True)
class Job:
    """Requests that `streams` clients send one after the other, or that arrive at `arrivals`."""

    prompts: list[list[int]]
    new: int
    streams: int
    arrivals: tuple[float, ...] = ()  # seconds; empty for a closed loop

    @property
    def context(self) -> int:
        """Tokens of the longest request."""
        return max(map(len, self.prompts)) + self.new


class Contender(Protocol):
    """`http` is false for a library that runs in a process without a server."""

    http: bool

    def measure(self, job: Job) -> Figures:
        """Measure a job in a fresh process. Raises RuntimeError with the reason if it fails."""


def figures(
    wall: float, started: Sequence[float], arrivals: Sequence[Sequence[float]], tokens: int
) -> Figures:
    """Return the figures of requests that started and whose tokens arrived at these seconds."""
    gaps = [b - a for times in arrivals for a, b in pairwise(times)]
    firsts = [times[0] - start for start, times in zip(started, arrivals, strict=True)]
    return Figures(
        tokens / wall,
        1e3 * statistics.median(gaps),
        1e3 * percentile(gaps, 99),
        1e3 * statistics.median(firsts),
        1e3 * percentile(firsts, 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]


def resident_mb(pid: int) -> float:
    """Return the resident megabytes of a process and its descendants."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(each.memory_info().rss for each in family) / 1e6


class LlamaCpp(Server):
    """llama.cpp's server with a slot for each stream of `job`, with room for its longest request.

    `program` is an executable built for this machine, and `model` is a GGUF file.
    """

    def __init__(self, program: Path, model: Path, job: Job) -> None:
        threads, context = torch.get_num_threads(), job.streams * (job.context + 1)
        slots = ["--parallel", str(job.streams), "--ctx-size", str(context)]
        sizes = ["--threads", str(threads), *slots]
        command = [str(program), "--model", str(model), *sizes]
        super().__init__([*command, "--host", "127.0.0.1"], "/health")


class OverHttp:
    """A server that is started by `start` for a job. `fields` are added to each request."""

    http = True

    def __init__(self, start: Callable[[Job], Server], fields: dict[str, Any]) -> None:
        self._start, self._fields = start, fields

    def measure(self, job: Job) -> Figures:
        try:
            with self._start(job) as server:
                held = resident_mb(server.process.pid)
                warm = [self.body(prompt[::-1], 8) for prompt in job.prompts[: job.streams]]
                asyncio.run(closed_loop(server.address, "/v1/completions", warm, job.streams))
                wall, done = asyncio.run(self._send(server.address, job))
        except SystemExit as error:  # it did not become ready
            raise RuntimeError(str(error)) from None
        if wrong := [c.tokens for c in done if c.tokens != job.new]:
            raise RuntimeError(f"{wrong[0]} tokens of output instead of {job.new}")
        times = [c.started for c in done], [c.arrivals for c in done]
        found = figures(wall, *times, sum(c.tokens for c in done))
        return found._replace(start=server.start_seconds, resident=held)

    def body(self, prompt: list[int], new: int) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        return streamed(body | self._fields)

    async def _send(self, address: str, job: Job) -> tuple[float, list[Completion]]:
        bodies = [self.body(prompt, job.new) for prompt in job.prompts]
        if not job.arrivals:
            return await closed_loop(address, "/v1/completions", bodies, job.streams)
        target, began = Target.parse(address), time.monotonic()

        async def one(at: float, body: dict[str, Any]) -> Completion:
            await asyncio.sleep(began + at - time.monotonic())
            done = (await exchange(target, "/v1/completions", body, limit_s=300)).completion()
            if done.error:
                raise RuntimeError(f"{done.error}: {done.message}")
            return done

        pairs = zip(job.arrivals, bodies, strict=True)
        done = await asyncio.gather(*(one(at, body) for at, body in pairs))
        return time.monotonic() - began, list(done)


class Worker:
    """A library in its own environment: a script there gets the job on stdin."""

    http = False

    def __init__(self, home: Path, script: str, model: Path, texts: Tokenizer | None) -> None:
        self._command = [home / "bin" / "python", Path(__file__).with_name(script)]
        self._model, self._texts = model, texts

    def measure(self, job: Job) -> Figures:
        if job.arrivals:
            raise RuntimeError("runs in process: no requests arrive")
        given: dict[str, Any] = {"model": str(self._model), "new": job.new, "streams": job.streams}
        if self._texts is None:
            given["prompts"] = job.prompts
        else:  # it takes no token ids: its prompts are texts of about as many tokens
            given["texts"] = [self._texts.decode(prompt) for prompt in job.prompts]
        done = subprocess.run(
            self._command, input=json.dumps(given), capture_output=True, text=True, timeout=WORKER_S
        )
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.split())[-300:])
        found = json.loads(done.stdout.splitlines()[-1])
        if wrong := [count for count in found["tokens"] if count != job.new]:
            raise RuntimeError(f"{wrong[0]} tokens of output instead of {job.new}")
        return figures(found["wall"], found["started"], found["arrivals"], sum(found["tokens"]))


def penstock(folder: Path) -> Contender:
    """Penstock as installed: without a flag."""
    return OverHttp(lambda job: Penstock(folder, []), {})


def llama_cpp(environment: Path, model: Path) -> Contender:
    program = llama_server(environment)
    return OverHttp(lambda job: LlamaCpp(program, model, job), {})


def vllm(environment: Path, folder: Path) -> Contender:
    def start(job: Job) -> Server:
        command = [str(environment / "bin" / "vllm"), "serve", str(folder), "--dtype", "bfloat16"]
        flags = ["--host", "127.0.0.1", "--served-model-name", "peer", "--max-num-seqs", "64"]
        length = ["--max-model-len", str(max(2048, job.context + 1))]
        variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings = [f"{name}={value}" for name, value in variables.items()]
        threads = [f"OMP_NUM_THREADS={torch.get_num_threads()}"]
        return Server(["env", *settings, *threads, *command, *flags, *length], "/health")

    return OverHttp(start, {"model": "peer"})
