"""Prompts after a restart with --kv-cache-dir.

A server computes prompts of random tokens and keeps their KV; another one without the flag computes
them in turn, which shows what keeping costs. The first is stopped and started again. The same
prompts then come from the folder, and a second time from memory. All times are milliseconds to the
only token of the answer.

The last table has the gaps between the tokens of a stream: alone, next to prompts that come from
the folder one after another, next to the same prompts from memory, and next to a computed one.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from loadtest.http_client import Completion, Target, stream
from loadtest.micro.case import Bound, Case, Table
from loadtest.schedule import DEMO_VOCABULARY, Ask
from loadtest.servers import Penstock

PATH, LIMIT_S = "/v1/completions", 600.0
STREAM_TOKENS = 800
MOST_OF_COLD = 0.2
COLD, NO_FLAG, RESTARTED, MEMORY = "computed", "without the flag", "after a restart", "in memory"
ALONE, KEPT = "alone", "next to prompts of the folder"
CACHED, COMPUTED = "next to prompts in memory", "next to computed prompts"


def prompts_of(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(DEMO_VOCABULARY, k=tokens) for _ in range(count)]


async def answer(target: Target, prompt: list[int], tokens: int = 1) -> Completion:
    done = await stream(target, PATH, Ask(0.0, prompt, tokens).body, LIMIT_S)
    if done.error:
        raise SystemExit(f"a request failed: {done.status} {done.error} {done.message}")
    return done


def times(server: Penstock, prompts: Sequence[list[int]], cached: int) -> list[float]:
    """Return the milliseconds of each prompt, and assert that `cached` tokens were known."""
    target = Target.parse(server.address)
    found = []
    for prompt in prompts:
        done = asyncio.run(answer(target, prompt))
        assert done.cached_tokens >= cached, done
        found.append(1000 * (done.ended - done.started))
    return found


async def gaps(target: Target, prompts: Sequence[list[int]]) -> list[float]:
    """Return the milliseconds between the tokens of a stream, while these prompts are answered."""
    running = asyncio.create_task(answer(target, list(range(400, 464)), STREAM_TOKENS))
    await asyncio.sleep(0.3)
    for prompt in prompts:
        await answer(target, prompt)
    is_over = running.done()
    done = await running
    if is_over:
        raise SystemExit("the stream ended before the prompts")
    return [1000 * gap for gap in done.gaps]


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kv"
    bare_flags = ["--speculation", "off", *options.flags]  # a draft shortens gaps
    flags = ["--kv-cache-dir", str(folder), *bare_flags]
    plain = stack.enter_context(Penstock(options.model, bare_flags))
    keeping = Penstock(options.model, flags)
    count, tokens = options.prompts, options.tokens
    prompts, others = prompts_of(count, tokens, 1), prompts_of(3, tokens, 2)
    cold: list[float] = []
    bare: list[float] = []
    with keeping:
        for server in (keeping, plain):  # compiles and records
            times(server, prompts_of(1, tokens, 3), 0)
        for prompt in prompts:
            bare += times(plain, [prompt], 0)
            cold += times(keeping, [prompt], 0)
        times(keeping, others, 0)
    known = tokens - 128
    again = stack.enter_context(Penstock(options.model, flags))
    times(again, prompts_of(1, 64, 4), 0)
    samples = {
        COLD: cold,
        NO_FLAG: bare,
        RESTARTED: times(again, prompts, known),
        MEMORY: times(again, prompts, known),
    }
    bound = Bound(RESTARTED, COLD, MOST_OF_COLD, at_most=True)
    size = sum(file.stat().st_size for file in folder.rglob("*.kv"))
    notes = {RESTARTED: f"{size >> 20} MiB in the folder"}
    yield Table(samples, f"ms, {tokens} tokens", (COLD,), [bound], notes)
    target = Target.parse(again.address)
    beside = {
        ALONE: asyncio.run(gaps(target, [])),
        KEPT: asyncio.run(gaps(target, others)),
        CACHED: asyncio.run(gaps(target, others)),
        COMPUTED: asyncio.run(gaps(target, prompts_of(1, tokens, 5))),
    }
    longest = {way: f"longest {max(values):.1f}" for way, values in beside.items()}
    yield Table(beside, "ms between tokens", notes=longest)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt")
    parser.add_argument("flags", nargs="*", help="further flags of the servers, after --")


CASE = Case(__doc__, add_options, measure)
