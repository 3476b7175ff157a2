"""`python -m loadtest.bench_embeddings MODEL`: compare texts/s of a sentence encoder over HTTP
with `transformers` in process, with the same weights and dtype.

There are 512 texts of 4 to 120 words. Penstock gets them one per request from 32 clients, and then
all in one request. transformers gets them as token lists, sorted by length, in padded batches of
32. Rounds alternate, so that changes in the machine's speed affect all contenders. Different texts
warm each of them up, because oneDNN compiles a kernel for each number of tokens. Medians are
printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch

from engine.device.facts import DTYPES, select_dtype
from loadtest.http_client import closed_loop
from loadtest.program import check_model, run_program
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


def ours(server: Penstock, given: list[str]) -> tuple[float, float]:
    """Return texts/s of 32 clients that send one text at a time, and of one request with all."""

    def rate(bodies: list[dict[str, Any]], clients: int) -> float:
        seconds, _ = asyncio.run(closed_loop(server.address, "/v1/embeddings", bodies, clients))
        return len(given) / seconds

    single = rate([{"input": text, "encoding_format": "base64"} for text in given], CLIENTS)
    return single, rate([{"input": given, "encoding_format": "base64"}], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a BERT sentence encoder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    check_model(str(options.model))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    torch.set_num_threads(options.threads)
    dtype = select_dtype(options.dtype, torch.device("cpu"))
    peer = Transformers(options.model, dtype)
    flags = ["--dtype", str(dtype).removeprefix("torch."), "--threads", str(options.threads)]
    names = (f"{CLIENTS} clients", "one request", "transformers")
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        given, others = texts(2 * number), texts(2 * number + 1)
        with Penstock(options.model, flags) as server:  # stopped before the peer uses its cores
            ours(server, others)
            round_rates = ours(server, given)
        peer.measure(others)
        for name, rate in zip(names, (*round_rates, peer.measure(given)), strict=True):
            print(f"round {number}: {name} {rate:.0f} texts/s", flush=True)
            rates[name].append(rate)
    print(json.dumps({name: round(statistics.median(each)) for name, each in rates.items()}))


if __name__ == "__main__":
    run_program(main)
