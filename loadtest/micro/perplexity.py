"""Perplexity that fewer bits cost a model.

Each form of the model is served in turn, and scores the same windows of tokens with
`prompt_logprobs`. A form is given by flags of `penstock serve`, such as "--quantization int8" or
"--kv-cache-dtype fp8". A prompt's tokens see the same rounded keys as generated tokens would.
TEXT is a file of text, or of JSON lines whose string values are joined.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2

from loadtest.micro.case import Case, Table
from loadtest.program import read_lines, read_text
from loadtest.servers import Penstock, Server

FORMS = (
    "",
    "--quantization int8",
    "--quantization int4",
    "--quantization fp8",
    "--kv-cache-dtype int8",
    "--kv-cache-dtype fp8",
)
WINDOW = 1024  # tokens that are scored together; the first one is not scored
AT_ONCE = 4


def text_of(file: Path) -> str:
    if file.suffix != ".jsonl":
        return read_text(file)
    values = [value for line in read_lines(file) for value in line.values()]
    return "\n".join(value for value in values if isinstance(value, str))


async def windows_of(client: httpx2.AsyncClient, text: str, tokens: int) -> list[list[int]]:
    """Return windows of at most WINDOW tokens, `tokens` in all."""
    body = {"prompt": text[: 8 * tokens], "add_special_tokens": False}
    answer = await client.post("/tokenize", json=body)
    ids: list[int] = answer.raise_for_status().json()["tokens"][:tokens]
    if len(ids) < tokens:
        raise SystemExit(
            f"The text has {len(ids)} tokens, and {tokens} are needed; give more text, or --tokens "
            f"{len(ids)}."
        )
    return [ids[first : first + WINDOW] for first in range(0, tokens, WINDOW)]


async def losses(client: httpx2.AsyncClient, windows: Sequence[list[int]]) -> list[float]:
    """Return -log p of all tokens but the first of each window."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(ids: list[int]) -> list[float]:
        body = {"prompt": ids, "max_tokens": 0, "prompt_logprobs": 0, "echo": True}
        async with room:
            answer = await client.post("/v1/completions", json=body)
        choice: dict[str, Any] = answer.raise_for_status().json()["choices"][0]
        scored = [entry for entry in choice["prompt_logprobs"] if entry]
        pairs = zip(scored, ids[1:], strict=True)
        return [-entry[str(token)]["logprob"] for entry, token in pairs]

    parts = await asyncio.gather(*(one(ids) for ids in windows))
    return [loss for part in parts for loss in part]


async def score(server: Server, text: str, tokens: int) -> float:
    """Return the perplexity: e to the mean of -log p."""
    async with httpx2.AsyncClient(base_url=f"http://{server.address}", timeout=600) as client:
        windows = await windows_of(client, text, tokens)
        return math.exp(statistics.fmean(await losses(client, windows)))


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    text = "\n".join(text_of(file) for file in options.text)
    found: dict[str, float] = {}
    for form in ("", *options.form) if options.form else FORMS:
        with Penstock(options.model, form.split()) as server:
            found[form or "as it is"] = asyncio.run(score(server, text, options.tokens))
    first = found["as it is"]
    notes = {form: f"{100 * (value / first - 1):+.2f} %" for form, value in found.items()}
    samples = {form: [value] for form, value in found.items()}
    yield Table(samples, "perplexity", notes=notes)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--form", action="append", help=f"default: {', '.join(FORMS[1:])}")
    parser.add_argument("text", type=Path, nargs="+")


CASE = Case(__doc__, add_options, measure)
