"""Images: the time to the first token with one picture, next to transformers and llama.cpp.

The model has SmolVLM-256M's shape and random weights. A picture of 512 x 512 pixels is one that no
request had before; it becomes 17 tiles, as the published settings say, or with --one-tile only one.
Penstock gets the request over HTTP, and then a second question about the same picture.
transformers has the same weights in bf16, and as many threads, in a process of its own.
llama.cpp's server gets the same request; its own converter wrote its two files. Next to the times
are seconds of CPU, which other programs of the machine change less.

The second table has the gaps of a stream of text: alone, next to requests with a picture each,
one after another, and next to requests with as many tokens of text.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from PIL import Image

from loadtest.http_client import Target, exchange, stream
from loadtest.micro.case import Bound, Case, Table, in_turn
from loadtest.peers.environments import converted, environment, llama_server
from loadtest.peers.in_process import Process
from loadtest.random_smolvlm import TEMPLATE, write_random_smolvlm
from loadtest.servers import Penstock, Server

PATH = "/v1/chat/completions"
EDGE, LIMIT_S = 512, 400.0
STREAM = 150  # tokens of the stream whose gaps are measured
PROMPT = 1180  # tokens of a prompt with a picture
CONTEXT = 8192  # of llama.cpp's server
FIRST, SECOND = "first question", "second question"
THEIRS, LLAMA = "transformers", "llama.cpp"
ALONE, IMAGES, TEXTS = "alone", "with pictures", "with texts"


class Cost(NamedTuple):
    """Seconds until the answer, of the clock and of CPU, and the tokens of the prompt."""

    wall: float
    cpu: float
    tokens: int


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU that a process and its children have taken."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


def picture(seed: int) -> str:
    """Return the base64 of a new picture: soft noise, as a PNG."""
    small = Image.frombytes("RGB", (32, 32), random.Random(seed).randbytes(3 * 32**2))
    file = io.BytesIO()
    small.resize((EDGE, EDGE), Image.Resampling.BICUBIC).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def about(data: str, question: str) -> dict[str, Any]:
    """Return a request for one token about a picture."""
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [shown, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}


async def answered(target: Target, body: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds of a request, and its tokens. Raises RuntimeError if it fails."""
    began = time.monotonic()
    answer = await exchange(target, PATH, body, LIMIT_S)
    done = answer.completion()
    if done.error:
        raise RuntimeError(f"{done.error}: {done.message}")
    return done.ended - began, json.loads(answer.body)["usage"]["prompt_tokens"]


async def p99_gap(target: Target, other: Callable[[int], dict[str, Any]] | None) -> float:
    """Return the p99 of milliseconds between a stream's tokens, with other requests if given."""

    async def load() -> None:
        for number in range(10_000):
            assert other is not None
            await answered(target, other(number))

    task = asyncio.create_task(load()) if other else None
    if task:
        await asyncio.sleep(0.3)
    body = {"messages": [{"role": "user", "content": "Tell me more."}], "ignore_eos": True}
    done = await stream(target, PATH, {**body, "max_tokens": STREAM, "temperature": 0}, LIMIT_S)
    if task:
        is_over = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=not is_over)
    if done.error:
        raise RuntimeError(f"{done.error}: {done.message}")
    return 1000 * float(np.percentile(done.gaps, 99))


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    torch.set_num_threads(options.threads)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "smolvlm"
    write_random_smolvlm(folder, edge=EDGE if options.one_tile else None)
    flags = ["--dtype", "bfloat16", "--threads", str(options.threads)]
    server = stack.enter_context(Penstock(folder, flags))
    target = Target.parse(server.address)
    if not options.gaps_only:
        yield from _first_tokens(folder, server, options, stack)
    if not options.no_gaps:
        yield _gaps(target, options.rounds)


def _first_tokens(
    folder: Path, server: Penstock, options: Namespace, stack: ExitStack
) -> Iterator[Table]:
    log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
    peer = Process([sys.executable, "-m", "loadtest.peers.worker_images"], log)
    stack.callback(peer.stop)
    peer.ask({"model": str(folder)}, LIMIT_S)

    def asked(server: Server, number: int, question: str) -> Cost:
        pid, target = server.process.pid, Target.parse(server.address)
        before = cpu_of(pid)
        wall, tokens = asyncio.run(answered(target, about(picture(number), question)))
        return Cost(wall, cpu_of(pid) - before, tokens)

    def theirs(number: int) -> Cost:
        before = cpu_of(peer.pid)
        message = {"picture": picture(number), "question": "What is it?"}
        found = peer.ask(message, LIMIT_S)
        return Cost(found["seconds"], cpu_of(peer.pid) - before, found["tokens"])

    def ours(number: int) -> dict[str, Cost]:
        first = asked(server, number, "What is it?")
        return {FIRST: first, SECOND: asked(server, number, "Which colours has it?")}

    ways: list[Callable[[int], dict[str, Cost]]] = [ours, lambda n: {THEIRS: theirs(n)}]
    bounds = [
        Bound(FIRST, THEIRS, 0.6, at_most=True),
        Bound(SECOND, FIRST, 0.25, at_most=True),
    ]
    if not options.no_llama:
        llama = stack.enter_context(_llama_server(folder, options))
        ways.append(lambda n: {LLAMA: asked(llama, n, "What is it?")})
        bounds.append(Bound(FIRST, LLAMA, 0.9, at_most=True))
    costs: dict[str, list[Cost]] = {}
    for number in range(options.rounds + 1):  # the first round warms up
        for turn in range(len(ways)):
            for way, cost in ways[(number + turn) % len(ways)](number).items():
                print(f"round {number}: {way}: {cost}", flush=True)
                if number:
                    costs.setdefault(way, []).append(cost)
    order = [way for way in (FIRST, SECOND, THEIRS, LLAMA) if way in costs]
    walls = {way: [cost.wall for cost in costs[way]] for way in order}
    cpus = {way: [cost.cpu for cost in costs[way]] for way in order}
    bases = [way for way in order if way != SECOND]
    yield Table(walls, "s to the first token", bases, bounds)
    yield Table(cpus, "s of CPU until then", bases, bounds)


def _llama_server(folder: Path, options: Namespace) -> Server:
    """Return llama.cpp's server for the model of `folder`, not yet started."""
    root = Path(options.peers)
    text, vision = folder.with_name("text.gguf"), folder.with_name("mmproj.gguf")
    converted(folder, text, "bf16", root)
    converted(folder, vision, "bf16", root, "--mmproj")
    template = folder.with_name("template.jinja")
    template.write_text(TEMPLATE)
    program = llama_server(environment("llama.cpp", root))
    files = ["--model", str(text), "--mmproj", str(vision), "--chat-template-file", str(template)]
    sizes = ["--threads", str(options.threads), "--parallel", "1", "--ctx-size", str(CONTEXT)]
    return Server([str(program), *files, "--jinja", *sizes, "--host", "127.0.0.1"], "/health")


def _gaps(target: Target, rounds: int) -> Table:
    def text(number: int) -> dict[str, Any]:
        words = random.Random(number).choices("abcdefghijklmnop ", k=PROMPT)
        return {"messages": [{"role": "user", "content": "".join(words)}], "max_tokens": 1}

    def gap(other: Callable[[int], dict[str, Any]] | None) -> Callable[[int], float]:
        def run(number: int) -> float:
            salted = None if other is None else lambda each: other(10_000 * (number + 1) + each)
            return asyncio.run(p99_gap(target, salted))

        return run

    ways = {
        ALONE: gap(None),
        IMAGES: gap(lambda number: about(picture(number), "What is it?")),
        TEXTS: gap(text),
    }
    found = in_turn(ways, rounds)
    bounds = (Bound(IMAGES, ALONE, 1.5, at_most=True), Bound(IMAGES, TEXTS, 1.5, at_most=True))
    return Table(found, "p99 of a stream's gaps, ms", (ALONE, TEXTS), bounds)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one-tile", action="store_true", help="pictures are not enlarged")
    parser.add_argument("--no-llama", action="store_true")
    parser.add_argument("--peers", default="build/peers", help="where llama.cpp is built")
    parser.add_argument("--gaps-only", action="store_true")
    parser.add_argument("--no-gaps", action="store_true")


CASE = Case(__doc__ or "", add_options, measure)
