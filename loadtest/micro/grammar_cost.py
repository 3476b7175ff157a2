"""Compile times and masks of grammars, and gaps of streams while hostile grammars compile.

Measured are:

- the compile time of each JSON schema in the files, and the time of a token's mask. Both are
  measured in this process, with the model's vocabulary or that of --tokenizer;
- the gap between the events of undisturbed streams, of the same streams while a server answers
  hostile requests, and while it answers the same requests without their grammars.

The hostile requests are sent by another process, so that their size does not delay the clock.
Requests without a grammar have the same size: the grammar stands in a field that is ignored.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from engine.checkpoint.folder import model_folder
from loadtest.http_client import Completion, Exchange, Target, exchange, stream
from loadtest.measure import spread
from loadtest.micro.case import Case, Samples, Table, in_turn
from loadtest.micro.grammar_times import GrammarTimes, read_schemas
from loadtest.micro.grammar_times import measure as grammar_times
from loadtest.micro.hostile_grammars import hostile_bodies
from loadtest.random_model import LLAMA_125M, write_random_model
from loadtest.servers import Penstock

PATH = "/v1/completions"
TOKENS = 400  # of each answer of the measured streams
WARM_UP_S = 2.0
LIMIT_S = 300.0
REASON_CHARS = 100
END_TOKENS = {"demo": 0, "125m": 2}
IGNORED = "x-grammar"  # no field of the API
STREAM = {
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "min_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 1,
}
Requests = Literal["none", "harmless", "hostile"]  # those in addition to the measured streams


async def send_hostile(address: str, count: int, at_once: int, requests: str) -> Counter[str]:
    """Send hostile requests, some at a time. Return how they ended."""
    target = Target.parse(address)
    short = {"prompt": "a", "max_tokens": 1, "temperature": 1}
    is_harmless = requests == "harmless"
    bodies = [short | ({IGNORED: each} if is_harmless else each) for each in hostile_bodies(count)]
    endings: Counter[str] = Counter()

    async def client() -> None:
        while bodies:
            endings[ending(await exchange(target, PATH, bodies.pop(), LIMIT_S))] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return endings


def ending(answer: Exchange) -> str:
    """Return the status, and the start of the reason of one that is not 200."""
    if answer.status == 200:
        return "200"
    reason = answer.message.partition(" (request ")[0]
    return f"{answer.status} {reason[:REASON_CHARS]}"


async def send_from_process(address: str, options: Namespace, requests: Requests) -> None:
    """Send the requests from another process. Print how they ended, once all have."""
    arguments = [address, str(options.hostile), str(options.at_once), requests]
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, *arguments), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await sender.communicate()
    for answer, count in Counter(json.loads(out)).most_common():
        print(f"    {count:4} {requests} requests: {answer}")


async def gaps_with(address: str, options: Namespace, requests: Requests) -> list[float]:
    """Return the gaps of the streams, for some seconds or until the last answer to `requests`."""
    target = Target.parse(address)
    is_over = False
    completions: list[Completion] = []

    async def client() -> None:
        while not is_over:
            completion = await stream(target, PATH, STREAM, LIMIT_S)
            if completion.error:
                raise SystemExit(f"A measured stream failed: {completion.message}")
            completions.append(completion)

    async with asyncio.TaskGroup() as clients:
        for _ in range(options.streams):
            clients.create_task(client())
        await asyncio.sleep(WARM_UP_S)
        begin = time.monotonic()
        if requests == "none":
            await asyncio.sleep(options.seconds)
        else:
            await send_from_process(address, options, requests)
        end = time.monotonic()
        is_over = True
    return [gap for each in completions for gap in gaps_between(each, begin, end)]


def gaps_between(completion: Completion, begin: float, end: float) -> list[float]:
    """Return the gaps of a stream that overlap the period from `begin` to `end`."""
    found = []
    for gap, at in zip(completion.gaps, completion.arrivals[1:], strict=True):
        if at >= begin and at - gap <= end:
            found.append(gap)
    return found


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    folder = model_folder("demo")
    if options.model != "demo":
        folder = Path(stack.enter_context(TemporaryDirectory()))
        write_random_model(folder, LLAMA_125M)
    if options.files:
        yield from tables_of_times(folder, options)
    if not options.rounds:
        return
    flags = ["--max-num-seqs", str(options.streams + 8)]
    server = stack.enter_context(Penstock(folder, flags))
    medians: dict[str, list[float]] = {requests: [] for requests in get_args(Requests)}

    def p99(requests: Requests, _: int) -> float:
        gaps = spread(asyncio.run(gaps_with(server.address, options, requests)))
        if gaps is None:
            raise SystemExit("No stream had two events in the measured period.")
        medians[requests].append(gaps.p50 * 1e3)
        return gaps.p99 * 1e3

    ways = {requests: partial(p99, requests) for requests in get_args(Requests)}
    yield Table(in_turn(ways, options.rounds), "ms, p99 of the gaps", ("none",))
    yield Table(medians, "ms, p50 of the gaps")


def tables_of_times(folder: Path, options: Namespace) -> Iterator[Table]:
    end = END_TOKENS[options.model] if options.end_token is None else options.end_token
    schemas = [schema for _, schema in read_schemas(options.files)]
    times: GrammarTimes = grammar_times(options.tokenizer or folder, end, schemas)
    notes = {"compile": f"{times.refused} of {len(schemas)} refused"}
    compiled: Samples = {"compile": [1e3 * one for one in times.compile]}
    yield Table(compiled, "ms", notes=notes)
    yield Table({"mask of a token": [1e6 * one for one in times.mask]}, "us")


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="JSON lines: schemas, or functions of BFCL")
    add("--model", choices=END_TOKENS, default="125m")
    add("--tokenizer", type=Path, help="folder of a tokenizer.json for the times")
    add("--end-token", type=int, help="of --tokenizer")
    add("--rounds", type=int, default=3, help="0: no server is measured")
    add("--streams", type=int, default=8)
    add("--seconds", type=float, default=15.0, help="of an undisturbed round")
    add("--hostile", type=int, default=200, help="hostile grammars of a round")
    add("--at-once", type=int, default=200, help="hostile requests at a time")


CASE = Case(__doc__, add_options, measure)

if __name__ == "__main__":  # the other process: ADDRESS COUNT AT_ONCE REQUESTS
    where, count, at_once, requests = sys.argv[1:]
    print(json.dumps(asyncio.run(send_hostile(where, int(count), int(at_once), requests))))
