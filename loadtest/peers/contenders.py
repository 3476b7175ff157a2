"""How `make bench-peers` starts and measures each contender: with equal prompts and lengths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.http_client import Completion, Target, closed_loop, exchange, streamed
from loadtest.peers.environments import llama_server
from loadtest.peers.figures import Figures, Measure, figures, resident_mb
from loadtest.peers.in_process import Worker
from loadtest.peers.jobs import JOB_S, Job, Room
from loadtest.peers.worker import Times
from loadtest.schedule import Ask
from loadtest.servers import Penstock, Server


class LlamaCpp(Server):
    """llama.cpp's server with a slot for each stream, each with room for the longest request.

    `program` is an executable built for this machine, and `model` is a GGUF file.
    """

    def __init__(self, program: Path, model: Path, room: Room) -> None:
        threads, context = torch.get_num_threads(), room.streams * (room.context + 1)
        slots = ["--parallel", str(room.streams), "--ctx-size", str(context)]
        sizes = ["--threads", str(threads), *slots]
        command = [str(program), "--model", str(model), *sizes]
        super().__init__([*command, "--host", "127.0.0.1"], "/health")


class OverHttp:
    """A server that is started by `start`. `fields` are added to each request.

    A `sized` server reserves memory for all its streams at once, so each workload has its own.
    """

    http = True

    def __init__(
        self, start: Callable[[Room], Server], fields: dict[str, Any], *, sized: bool = False
    ) -> None:
        self._start, self.fields, self.sized = start, fields, sized

    @contextmanager
    def serving(self, room: Room) -> Iterator[Server]:
        """Run a fresh server. Raises RuntimeError with the reason if it does not start."""
        with ExitStack() as stack:
            try:
                server = stack.enter_context(self._start(room))
            except SystemExit as error:
                raise RuntimeError(str(error)) from None
            yield server

    @contextmanager
    def running(self, room: Room) -> Iterator[Measure]:
        """Run a fresh server for measurements. Raises RuntimeError as `serving`."""
        with self.serving(room) as server:
            yield lambda job: asyncio.run(self._measure(server, job))

    async def _measure(self, server: Server, job: Job) -> Figures:
        try:
            async with asyncio.timeout(JOB_S):
                await self._send(server.address, job.warm_up)
            resident = resident_mb(server.process.pid)
            async with asyncio.timeout(JOB_S):
                times = await self._send(server.address, job)
        except TimeoutError:
            raise RuntimeError(f"it took longer than {JOB_S:g} s") from None
        return figures(times, job)._replace(start=server.start_seconds, resident=resident)

    async def _send(self, address: str, job: Job) -> Times:
        bodies = [self._body(prompt, job.new) for prompt in job.prompts]
        if job.arrivals:
            return await open_loop(address, bodies, job.arrivals)
        wall, done = await closed_loop(address, "/v1/completions", bodies, job.streams)
        times = Times(wall)
        for one in done:
            times.add(one.started, list(one.arrivals), one.tokens, one.prompt_tokens)
        return times

    def _body(self, prompt: list[int], new: int) -> dict[str, Any]:
        return streamed(Ask(0.0, prompt, new).body | self.fields)


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


@dataclass(frozen=True)
class Started:
    """A contender that was started before, and runs until all rounds are done."""

    http: bool
    figures_of: Measure
    sized: bool = False  # it has room for every workload

    @contextmanager
    def running(self, room: Room) -> Iterator[Measure]:
        yield self.figures_of


# All have `http`, which is false for a library that runs in a process without a server.
Contender = OverHttp | Worker | Started


def penstock(folder: Path, *flags: str) -> OverHttp:
    """Penstock as installed, but for two flags.

    It makes no drafts, because random weights repeat themselves too often, and requests that come
    at once wait for as long as the other servers let them.
    """
    given = ["--speculation", "off", "--max-queue-wait", "60", *flags]
    return OverHttp(lambda room: Penstock(folder, given), {})


def llama_cpp(environment: Path, model: Path) -> OverHttp:
    program = llama_server(environment)
    return OverHttp(lambda room: LlamaCpp(program, model, room), {}, sized=True)


def vllm(environment: Path, folder: Path) -> OverHttp:
    def start(room: Room) -> Server:
        command = [str(environment / "bin" / "vllm"), "serve", str(folder), "--dtype", "bfloat16"]
        flags = ["--host", "127.0.0.1", "--served-model-name", "peer", "--max-num-seqs", "64"]
        length = ["--max-model-len", str(max(2048, room.context + 1))]
        usage = "--enable-prompt-tokens-details"  # for prefix_hits.py
        settings = [
            "VLLM_CPU_KVCACHE_SPACE=2",  # GB
            "VLLM_CPU_OMP_THREADS_BIND=nobind",
            "VLLM_NO_USAGE_STATS=1",
            f"OMP_NUM_THREADS={torch.get_num_threads()}",
        ]
        return Server(["env", *settings, *command, *flags, *length, usage], "/health")

    return OverHttp(start, {"model": "peer"})
