"""Texts/s of a sentence encoder over HTTP, and of `transformers` in process.

Both have the same weights and dtype. There are 512 texts of 4 to 120 words. Penstock gets them one
per request from 32 clients, or all in one request. transformers gets them as token lists, sorted by
length, in padded batches of 32. Different texts warm each of them up, because oneDNN compiles a
kernel for each number of tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch

from engine.device.facts import DTYPES, select_dtype
from loadtest.http_client import closed_loop
from loadtest.micro.case import Case, Table, in_turn
from loadtest.program import check_model
from loadtest.servers import Penstock

TEXTS, CLIENTS, BATCH = 512, 32, 32
SYLLABLES = ("ka", "lo", "mi", "ren", "tas", "vor", "el", "dun", "shi", "par", "ost", "ine")


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 2)))

    # Most texts are short and a few are long, like questions and passages.
    lengths = [min(120, max(4, round(rng.lognormvariate(2.8, 0.8)))) for _ in range(TEXTS)]
    return [" ".join(word() for _ in range(length)) for length in lengths]


class Transformers:
    """The encoder in this process, with mean pooling of the last hidden states."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @torch.inference_mode()
    def measure(self, given: list[str]) -> float:
        began = time.monotonic()
        ids = sorted((e.ids for e in self.tokenizer.encode_batch(given)), key=len)
        for first in range(0, len(ids), BATCH):
            part = [torch.tensor(tokens) for tokens in ids[first : first + BATCH]]
            padded = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in part], True)
            hidden = self.model(padded, attention_mask=mask).last_hidden_state.float()
            (hidden * mask[..., None]).sum(1).div(mask.sum(1, keepdim=True)).numpy()
        return len(given) / (time.monotonic() - began)


def rate(server: Penstock, given: list[str], *, at_once: bool) -> float:
    """Return texts/s of one request with all texts, or of clients that send a text at a time."""
    inputs: list[Any] = [given] if at_once else list(given)
    bodies = [{"input": one, "encoding_format": "base64"} for one in inputs]
    clients = 1 if at_once else CLIENTS
    seconds, _ = asyncio.run(closed_loop(server.address, "/v1/embeddings", bodies, clients))
    return len(given) / seconds


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    check_model(str(options.model))
    torch.set_num_threads(options.threads)
    dtype = select_dtype(options.dtype, torch.device("cpu"))
    peer = Transformers(options.model, dtype)
    flags = ["--dtype", str(dtype).removeprefix("torch."), "--threads", str(options.threads)]
    flags += ["--max-queue-wait", "60"]  # on a slow machine, all clients may wait for longer

    def ours(number: int, *, at_once: bool) -> float:
        with Penstock(options.model, flags) as server:  # stopped before another uses its cores
            rate(server, texts(2 * number + 1), at_once=at_once)
            return rate(server, texts(2 * number), at_once=at_once)

    def theirs(number: int) -> float:
        peer.measure(texts(2 * number + 1))
        return peer.measure(texts(2 * number))

    ways: dict[str, Callable[[int], float]] = {
        f"{CLIENTS} clients": partial(ours, at_once=False),
        "one request": partial(ours, at_once=True),
        "transformers": theirs,
    }
    yield Table(in_turn(ways, options.rounds), "texts/s", ("transformers",))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a BERT sentence encoder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())


CASE = Case(__doc__, add_options, measure)
