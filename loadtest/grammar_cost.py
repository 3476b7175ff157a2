"""Measure structured output: `python -m loadtest.grammar_cost FILE ...`.

Reported are, with p50 and p99:

- the compile time of each JSON schema in the files, and the time of a token's mask. Both are
  measured in this process, with the model's vocabulary or that of --tokenizer;
- the gap between the events of undisturbed streams, of the same streams while a server answers
  hostile requests, and while it answers the same requests without their grammars. All are measured
  in turn, several times, and the medians count.

The hostile requests are sent by another process, so that their size does not delay the clock.
Requests without a grammar have the same size: the grammar stands in a field that is ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from engine.checkpoint.folder import model_folder
from loadtest.grammar_times import measure, read_schemas
from loadtest.hostile_grammars import hostile_bodies
from loadtest.http_client import Completion, Exchange, Target, exchange, stream
from loadtest.measure import Spread, spread
from loadtest.program import run_program
from loadtest.random_model import LLAMA_125M, write_random_llama
from loadtest.servers import Penstock

PATH = "/v1/completions"
TOKENS = 400  # of each answer of the measured streams
WARM_UP_S = 2.0
LIMIT_S = 300.0
REASON_CHARS = 100
END_TOKENS = {"demo": 0, "125m": 2}
IGNORED = "x-grammar"  # no field of the API
Requests = Literal["none", "harmless", "hostile"]  # those in addition to the measured streams


@dataclass(frozen=True)
class Round:
    """The gaps between events in one period, in seconds, and the answers to hostile requests."""

    gaps: Spread
    seconds: float
    answers: Counter[str]


def stream_body() -> dict[str, Any]:
    return {
        "prompt": "Once upon a time",
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 1,
    }


async def send_hostile(address: str, given: argparse.Namespace) -> Counter[str]:
    """Send hostile requests, some at a time, after a line from stdin.

    Return how they ended.
    """
    target = Target.parse(address)
    short = {"prompt": "a", "max_tokens": 1, "temperature": 1}
    grammars = hostile_bodies(given.hostile)
    bodies = [short | ({IGNORED: each} if given.harmless else each) for each in grammars]
    endings: Counter[str] = Counter()

    async def client() -> None:
        while bodies:
            endings[ending(await exchange(target, PATH, bodies.pop(), LIMIT_S))] += 1

    sys.stdin.readline()
    async with asyncio.TaskGroup() as clients:
        for _ in range(given.at_once):
            clients.create_task(client())
    return endings


def ending(answer: Exchange) -> str:
    """Return the status, and the start of the reason of one that is not 200."""
    if answer.status == 200:
        return "200"
    reason = answer.message.partition(" (request ")[0]
    return f"{answer.status} {reason[:REASON_CHARS]}"


async def send_from_process(
    address: str, given: argparse.Namespace, requests: Requests
) -> Counter[str]:
    """Send the requests from another process. Return how they ended, once all have."""
    command = [sys.executable, "-m", "loadtest.grammar_cost", "--send", address]
    command += ["--hostile", f"{given.hostile}", "--at-once", f"{given.at_once}"]
    if requests == "harmless":
        command.append("--harmless")
    pipe = asyncio.subprocess.PIPE
    sender = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    out, _ = await sender.communicate(b"\n")
    return Counter(json.loads(out))


async def one_round(address: str, given: argparse.Namespace, requests: Requests) -> Round:
    """Return the gaps of the streams, for some seconds or until the last answer to `requests`."""
    target = Target.parse(address)
    is_over = False
    completions: list[Completion] = []

    async def client() -> None:
        while not is_over:
            completion = await stream(target, PATH, stream_body(), LIMIT_S)
            if completion.error:
                raise SystemExit(f"A measured stream failed: {completion.message}")
            completions.append(completion)

    async with asyncio.TaskGroup() as clients:
        for _ in range(given.streams):
            clients.create_task(client())
        await asyncio.sleep(WARM_UP_S)
        begin = time.monotonic()
        answers: Counter[str] = Counter()
        if requests == "none":
            await asyncio.sleep(given.seconds)
        else:
            answers = await send_from_process(address, given, requests)
        end = time.monotonic()
        is_over = True
    gaps = spread(gap for c in completions for gap in gaps_between(c, begin, end))
    if gaps is None:
        raise SystemExit("No stream had two events in the measured period.")
    return Round(gaps, end - begin, answers)


def gaps_between(completion: Completion, begin: float, end: float) -> list[float]:
    """Return the gaps of a stream that overlap the period from `begin` to `end`."""
    found = []
    for gap, at in zip(completion.gaps, completion.arrivals[1:], strict=True):
        if at >= begin and at - gap <= end:
            found.append(gap)
    return found


def print_times(name: str, times: Sequence[float], unit: str, factor: float) -> None:
    found = spread(times)
    if found is None:
        return
    figures = [found.p50, found.p99, found.max]
    p50, p99, most = (f"{value * factor:.2f}" for value in figures)
    print(f"{name:20} n {found.count:6}   p50 {p50} {unit}   p99 {p99} {unit}   max {most} {unit}")


def print_rounds(rounds: Mapping[Requests, Sequence[Round]]) -> None:
    for requests, those in rounds.items():
        for this in those:
            gaps = this.gaps
            line = f"{requests:9} p50 {gaps.p50 * 1e3:.1f} ms   p99 {gaps.p99 * 1e3:.1f} ms   "
            line += f"max {gaps.max * 1e3:.1f} ms   in {this.seconds:.1f} s"
            print(line)
            for answer, count in this.answers.most_common():
                print(f"    {count:4} requests: {answer}")
    for requests in ("harmless", "hostile"):
        pairs = zip(rounds["none"], rounds[requests], strict=True)
        ratio = statistics.median(b.gaps.p99 / a.gaps.p99 for a, b in pairs)
        print(f"{requests}: p99 is {ratio:.2f} times the one without requests (median)")


@contextlib.contextmanager
def folder_of(model: str) -> Iterator[Path]:
    if model == "demo":
        yield model_folder("demo")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_random_llama(Path(folder), LLAMA_125M)
        yield Path(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.grammar_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="JSON lines: schemas, or functions of BFCL"
    )
    parser.add_argument("--model", choices=END_TOKENS, default="125m")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json for the times")
    parser.add_argument("--end-token", type=int, help="of --tokenizer")
    parser.add_argument("--rounds", type=int, default=3, help="0: no server is measured")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="of an undisturbed round")
    parser.add_argument("--hostile", type=int, default=200, help="hostile grammars of a round")
    parser.add_argument("--at-once", type=int, default=200, help="hostile requests at a time")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--harmless", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.send:
        print(json.dumps(asyncio.run(send_hostile(given.send, given))))
        return
    with folder_of(given.model) as folder:
        if given.files:
            end = END_TOKENS[given.model] if given.end_token is None else given.end_token
            schemas = read_schemas(given.files)
            times = measure(given.tokenizer or folder, end, [schema for _, schema in schemas])
            print(f"{len(schemas)} schemas, {times.refused} refused")
            print_times("compile", times.compile, "ms", 1e3)
            print_times("mask of a token", times.mask, "us", 1e6)
        if not given.rounds:
            return
        rounds: dict[Requests, list[Round]] = {kind: [] for kind in get_args(Requests)}
        flags = ["--max-num-seqs", str(given.streams + 8)]
        with Penstock(folder, flags) as server:
            for _ in range(given.rounds):
                for requests, those in rounds.items():
                    those.append(asyncio.run(one_round(server.address, given, requests)))
        print_rounds(rounds)


if __name__ == "__main__":
    run_program(main)
