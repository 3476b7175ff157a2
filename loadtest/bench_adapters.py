"""Measure what LoRA adapters cost: `python -m loadtest.bench_adapters`.

A server has a random Llama and random adapters. Each of the streams sends the same request to the
base model, then all to one adapter, then each to an adapter of its own, in turn for some rounds.
After that, adapters are loaded one by one while all streams run, and the longest gap between two
tokens of a stream is compared with the usual ones.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
from safetensors.torch import load_file

from loadtest.http_client import Completion, Target, stream
from loadtest.program import run_program
from loadtest.random_model import LLAMA_1B, LLAMA_125M, write_random_adapter, write_random_llama
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


async def throughput(
    target: Target, mixes: Mapping[str, Sequence[str]], rounds: int, tokens: int
) -> dict[str, list[float]]:
    """Return the rates of each mix of models, one for each round."""
    rates: dict[str, list[float]] = {name: [] for name in mixes}
    for models in mixes.values():  # the first requests of a kind compile or record
        await answers(target, models, 0, 8)
    for turn in range(rounds):
        for name, models in mixes.items():
            rates[name].append(rate(await answers(target, models, 1000 * turn, tokens)))
    return rates


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


def row(name: str, rates: Sequence[float], base: Sequence[float]) -> str:
    ratios = [own / other for own, other in zip(rates, base, strict=True)]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {name} | {statistics.median(rates):.0f} | {ratio} |\n"


async def measure(server: Penstock, given: argparse.Namespace, folders: Sequence[Path]) -> None:
    target = Target.parse(f"http://{server.address}")
    names = [folder.name for folder in folders[: given.streams]]
    mixes = {
        "none": [BASE] * given.streams,
        "one": [names[0]] * given.streams,
        f"{given.streams}, one each": names,
    }
    rates = await throughput(target, mixes, given.rounds, given.tokens)
    sys.stdout.write("| adapters | tokens/s | of the rate without |\n|---|---|---|\n")
    for name, found in rates.items():
        sys.stdout.write(row(name, found, rates["none"]))
    quiet = await answers(target, mixes["none"], 7, given.tokens)
    usual = [max(one.gaps[1:]) for one in quiet]
    loading = await gaps_while_loading(
        target, given.streams, 2 * given.tokens, folders[given.streams :]
    )
    step = statistics.median(gap for one in quiet for gap in one.gaps)
    sys.stdout.write(
        f"\nA step takes {1000 * step:.1f} ms. The longest gap of a stream is "
        f"{1000 * max(usual):.1f} ms, and {1000 * max(loading):.1f} ms while "
        f"{len(folders) - given.streams} adapters are loaded.\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_adapters", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=4, help="adapters loaded while streams run")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_random_llama(model, SHAPES[given.shape])
        shapes = {
            name: tuple(weight.shape)
            for name, weight in load_file(model / "model.safetensors").items()
        }
        folders = [Path(folder) / f"a{n}" for n in range(given.streams + given.loads)]
        for number, adapter in enumerate(folders):
            write_random_adapter(adapter, shapes, given.rank, number)
        modules = [f"{one.name}={one}" for one in folders[: given.streams]]
        flags = ["--lora-modules", *modules, "--max-loras", str(len(folders))]
        flags += ["--served-model-name", BASE, "--speculation", "off"]
        with Penstock(model, [*flags, "--no-enable-prefix-caching", *given.flags]) as server:
            asyncio.run(measure(server, given, folders))


if __name__ == "__main__":
    run_program(main)
