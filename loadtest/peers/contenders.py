"""How `make bench-peers` starts and measures each contender: with equal prompts and lengths."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from loadtest.http_client import Completion, Target, closed_loop, exchange, streamed
from loadtest.peers.environments import llama_server
from loadtest.peers.jobs import Job, Words
from loadtest.peers.worker import WARM_NEW, Times, WorkerJob
from loadtest.servers import Penstock, Server

ROOT = Path(__file__).resolve().parents[2]
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


def figures(times: Times, job: Job) -> Figures:
    """Return the figures of a job. Raises RuntimeError if an answer or a prompt has other tokens.

    A server that does not report the length of a prompt reports 0.
    """
    if wrong := [count for count in times.tokens if count != job.new]:
        raise RuntimeError(f"{wrong[0]} tokens of output instead of {job.new}")
    length = len(job.prompts[0])
    if wrong := [count for count in times.prompt_tokens if count not in (0, length)]:
        raise RuntimeError(f"{wrong[0]} tokens of prompt instead of {length}")
    if not all(times.arrivals):
        raise RuntimeError("an answer has no event with text")
    gaps = [b - a for arrivals in times.arrivals for a, b in pairwise(arrivals)]
    pairs = zip(times.started, times.arrivals, strict=True)
    firsts = [arrivals[0] - started for started, arrivals in pairs]
    return Figures(
        sum(times.tokens) / times.wall,
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
        """Measure a job in a fresh process. Raises RuntimeError with the reason if it fails."""
        try:
            with self._start(job) as server:
                held = resident_mb(server.process.pid)
                warm = [self.body(prompt, WARM_NEW) for prompt in job.warm_up]
                asyncio.run(closed_loop(server.address, "/v1/completions", warm, job.streams))
                times = asyncio.run(self._send(server.address, job))
        except SystemExit as error:  # it did not become ready
            raise RuntimeError(str(error)) from None
        return figures(times, job)._replace(start=server.start_seconds, resident=held)

    def body(self, prompt: list[int], new: int) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        return streamed(body | self._fields)

    async def _send(self, address: str, job: Job) -> Times:
        bodies = [self.body(prompt, job.new) for prompt in job.prompts]
        if job.arrivals:
            return await open_loop(address, bodies, job.arrivals)
        wall, done = await closed_loop(address, "/v1/completions", bodies, job.streams)
        times = Times(wall)
        for one in done:
            times.add(one.started, list(one.arrivals), one.tokens, one.prompt_tokens)
        return times


async def open_loop(
    address: str, bodies: Sequence[dict[str, Any]], arrivals: Sequence[float]
) -> Times:
    """Send each body at its time. Times begin at the intended arrival, as users experience them.

    Raises RuntimeError with the server's message if a response is incomplete.
    """
    target, began = Target.parse(address), time.monotonic()

    async def one(at: float, body: dict[str, Any]) -> Completion:
        await asyncio.sleep(began + at - time.monotonic())
        done = (await exchange(target, "/v1/completions", body, limit_s=300)).completion()
        if done.error:
            raise RuntimeError(f"{done.error}: {done.message}")
        return done

    pairs = zip(arrivals, bodies, strict=True)
    done = await asyncio.gather(*(one(at, body) for at, body in pairs))
    times = Times(time.monotonic() - began)
    for at, each in zip(arrivals, done, strict=True):
        times.add(began + at, list(each.arrivals), each.tokens, each.prompt_tokens)
    return times


class Worker:
    """A library that runs in its own environment: the module `script` gets the job on stdin.

    With `words`, its prompts are texts of the same token ids.
    """

    http = False

    def __init__(self, python: Path, script: str, model: Path, words: Words | None = None) -> None:
        self._command = [str(python), "-m", f"loadtest.peers.{script}"]
        self._model, self._words = model, words

    def measure(self, job: Job) -> Figures:
        """Measure a job in a fresh process. Raises RuntimeError with the reason if it fails."""
        given = WorkerJob(
            model=str(self._model),
            prompts=self._prompts(job.prompts),
            warm=self._prompts(job.warm_up),
            new=job.new,
            streams=job.streams,
            arrivals=list(job.arrivals),
        )
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        began = time.monotonic()
        done = subprocess.run(
            self._command,
            input=json.dumps(vars(given)),
            capture_output=True,
            text=True,
            timeout=WORKER_S,
            env=os.environ | threads | {"PYTHONPATH": str(ROOT)},
        )
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.split())[-300:])
        found = json.loads(done.stdout.splitlines()[-1])
        start, resident = found.pop("ready") - began, found.pop("resident")
        return figures(Times(**found), job)._replace(start=start, resident=resident)

    def _prompts(self, prompts: list[list[int]]) -> list[Any]:
        if self._words is None:
            return list(prompts)
        return [self._words.text(prompt) for prompt in prompts]


# Both have `http`, which is false for a library that runs in a process without a server.
Contender = OverHttp | Worker


def penstock(folder: Path) -> OverHttp:
    """Penstock as installed: without a flag."""
    return OverHttp(lambda job: Penstock(folder, []), {})


def llama_cpp(environment: Path, model: Path) -> OverHttp:
    program = llama_server(environment)
    return OverHttp(lambda job: LlamaCpp(program, model, job), {})


def vllm(environment: Path, folder: Path) -> OverHttp:
    def start(job: Job) -> Server:
        command = [str(environment / "bin" / "vllm"), "serve", str(folder), "--dtype", "bfloat16"]
        flags = ["--host", "127.0.0.1", "--served-model-name", "peer", "--max-num-seqs", "64"]
        length = ["--max-model-len", str(max(2048, job.context + 1))]
        settings = [
            "VLLM_CPU_KVCACHE_SPACE=2",  # GB
            "VLLM_CPU_OMP_THREADS_BIND=nobind",
            "VLLM_NO_USAGE_STATS=1",
            f"OMP_NUM_THREADS={torch.get_num_threads()}",
        ]
        return Server(["env", *settings, *command, *flags, *length], "/health")

    return OverHttp(start, {"model": "peer"})
