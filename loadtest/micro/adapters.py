"""Throughput and gaps with LoRA adapters.

A server has a random Llama and random adapters. Each of the streams sends the same request to the
base model, then all to one adapter, then each to an adapter of its own, in turn for some rounds.
After that, adapters are loaded one by one while all streams run, and the longest gap between two
tokens of a stream is compared with the usual ones.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
from safetensors.torch import load_file

from loadtest.http_client import Completion, Target, stream
from loadtest.micro.case import Case, Table, in_turn
from loadtest.random_model import LLAMA_1B, LLAMA_125M, write_random_adapter, write_random_model
from loadtest.schedule import Ask
from loadtest.servers import Penstock

SHAPES = {"125m": LLAMA_125M, "1.1b": LLAMA_1B}
PROMPT, LIMIT_S = 32, 600.0
BASE = "base"


def request(model: str, number: int, tokens: int) -> dict[str, Any]:
    prompt = [3 + (7 * number + 3 * place) % 256 for place in range(PROMPT)]
    return {"model": model, **Ask(0.0, prompt, tokens).body}


async def answers(
    target: Target, models: Sequence[str], seed: int, tokens: int
) -> list[Completion]:
    """Send a request to each of the models at once, and return the answers."""
    bodies = [request(model, seed + n, tokens) for n, model in enumerate(models)]
    found = await asyncio.gather(*(stream(target, "/v1/completions", body) for body in bodies))
    for one in found:
        if one.error or one.status != 200:
            raise SystemExit(f"a request failed: {one.status} {one.error} {one.message}")
    return list(found)


def rate(found: Sequence[Completion]) -> float:
    """Return the tokens per second of all streams while all of them decode."""
    begin = max(one.arrivals[0] for one in found)
    end = min(one.arrivals[-1] for one in found)
    tokens = sum(begin < at <= end for one in found for at in one.arrivals)
    return tokens / (end - begin)


async def gaps_while_loading(
    target: Target, streams: int, tokens: int, folders: Sequence[Path]
) -> list[float]:
    """Return each stream's longest gap in seconds while adapters are loaded one after another."""
    running = asyncio.create_task(answers(target, [BASE] * streams, 7, tokens))
    await asyncio.sleep(1)
    url = f"http://{target.host}:{target.port}/v1/load_lora_adapter"
    async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
        for folder in folders:
            body = {"lora_name": f"later-{folder.name}", "lora_path": str(folder)}
            (await client.post(url, json=body)).raise_for_status()
    if running.done():
        raise SystemExit("the streams ended before the adapters were loaded; give more --tokens")
    return [max(one.gaps[1:]) for one in await running]


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    streams, tokens = options.streams, options.tokens
    root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    folders = write_models(root, options)
    names = [folder.name for folder in folders[:streams]]
    modules = [f"{one.name}={one}" for one in folders[:streams]]
    flags = ["--lora-modules", *modules, "--max-loras", str(len(folders))]
    flags += ["--served-model-name", BASE, "--speculation", "off"]
    flags += ["--no-enable-prefix-caching", *options.flags]
    server = stack.enter_context(Penstock(root / "model", flags))
    target = Target.parse(f"http://{server.address}")

    def answer(models: Sequence[str], seed: int, tokens: int = tokens) -> list[Completion]:
        return asyncio.run(answers(target, models, seed, tokens))

    base = [BASE] * streams
    mixes = {"none": base, "one": [names[0]] * streams, f"{streams}, one each": names}
    for models in mixes.values():  # the first requests of a kind compile or record
        answer(models, 0, 8)
    ways = {
        name: lambda turn, models=models: rate(answer(models, 1000 * turn))
        for name, models in mixes.items()
    }
    yield Table(in_turn(ways, options.rounds), "tokens/s, by adapters", ("none",))
    quiet = answer(base, 7)
    loading = asyncio.run(gaps_while_loading(target, streams, 2 * tokens, folders[streams:]))
    yield Table(
        {
            "a step": [1000 * gap for one in quiet for gap in one.gaps],
            "longest gap of a stream": [1000 * max(one.gaps[1:]) for one in quiet],
            f"while {options.loads} adapters are loaded": [1000 * gap for gap in loading],
        },
        "ms",
    )


def write_models(root: Path, options: Namespace) -> list[Path]:
    """Write a model into `root`, and adapters. Return the adapters' folders."""
    model = root / "model"
    write_random_model(model, SHAPES[options.shape])
    weights = load_file(model / "model.safetensors")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    folders = [root / f"a{number}" for number in range(options.streams + options.loads)]
    for number, adapter in enumerate(folders):
        write_random_adapter(adapter, shapes, options.rank, number)
    return folders


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=4, help="adapters loaded while streams run")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")


CASE = Case(__doc__, add_options, measure)
