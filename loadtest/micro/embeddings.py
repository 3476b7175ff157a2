"""Embeddings and scores of pairs: Penstock next to sentence-transformers and ONNX Runtime.

All have the same weights, threads and texts, 512 of 4 to 120 words. Penstock gets them over HTTP,
one per request from 32 clients, or all in one request. The others compute in a process of their
own, in sorted and padded batches of 32. ONNX Runtime has three settings; the table has the lowest
cosine of each to fp32. Also measured: the engine's own time for one short text, and how long such a
text waits while eight clients send long ones. Other texts warm each of them up.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.device.facts import DTYPES, select_dtype
from loadtest.http_client import Target, closed_loop, exchange
from loadtest.micro.case import Bound, Case, Table, in_turn
from loadtest.peers.environments import SENTENCES, environment
from loadtest.peers.in_process import Process
from loadtest.program import check_model
from loadtest.servers import Penstock

TEXTS, CLIENTS, LONG_CLIENTS, SHORT_TEXTS = 512, 32, 8, 200
SHORT, LONG = 6, 85  # words
LIMIT_S = 600.0
EXACT = 0.999  # the lowest cosine to fp32 of a setting that counts
ST, ORT = "sentence-transformers bf16", "onnxruntime fp32"
ORT_SETTINGS = (ORT, "onnxruntime int8 blocks", "onnxruntime int8")
SYLLABLES = ("ka", "lo", "mi", "ren", "tas", "vor", "el", "dun", "shi", "par", "ost", "ine")


def words(rng: random.Random, count: int) -> str:
    def word() -> str:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 2)))

    return " ".join(word() for _ in range(count))


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    # Most texts are short and a few are long, like questions and passages.
    lengths = [min(120, max(4, round(rng.lognormvariate(2.8, 0.8)))) for _ in range(TEXTS)]
    return [words(rng, length) for length in lengths]


def pairs(seed: int) -> list[list[str]]:
    """Return a short question with each text."""
    rng = random.Random(seed)
    return [[words(rng, SHORT), text] for text in texts(seed)]


class Peers:
    """The process of the other libraries."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def rate(self, way: str, folder: Path, number: int, *, of_pairs: bool = False) -> float:
        """Return texts or pairs per second."""
        self._ask({"load": way, "model": str(folder)})
        kind, make = ("pairs", pairs) if of_pairs else ("texts", texts)
        self._ask({kind: make(2 * number + 1)})
        seconds: float = self._ask({kind: make(2 * number)})["seconds"]
        return TEXTS / seconds

    def milliseconds(self, way: str, folder: Path, given: Sequence[str]) -> float:
        """Return the median time of one text alone."""
        self._ask({"load": way, "model": str(folder)})
        times = [float(self._ask({"texts": [text]})["seconds"]) for text in given]
        return 1000 * statistics.median(times)

    def lowest_cosine(self, way: str, folder: Path) -> float:
        found = [self._vectors(each, folder) for each in ("sentence-transformers fp32", way)]
        return float((found[0] * found[1]).sum(1).min())

    def _vectors(self, way: str, folder: Path) -> np.ndarray[Any, Any]:
        self._ask({"load": way, "model": str(folder)})
        return np.array(self._ask({"texts": texts(-1)[:64], "wanted": True})["result"])

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._process.ask(message, LIMIT_S)


def rate(address: str, path: str, bodies: Sequence[dict[str, Any]], clients: int) -> float:
    """Return texts or pairs per second of a server."""
    seconds, _ = asyncio.run(closed_loop(address, path, bodies, clients))
    return TEXTS / seconds


def bodies_of(given: list[str], *, at_once: bool) -> list[dict[str, Any]]:
    inputs: list[Any] = [given] if at_once else list(given)
    return [{"input": one, "encoding_format": "base64"} for one in inputs]


def short_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [words(rng, SHORT) for _ in range(SHORT_TEXTS)]


def own_milliseconds(setup: dict[str, Any], seed: int) -> float:
    """Return the engine's median time of one short text alone, in a fresh process."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = Process([sys.executable, "-m", "loadtest.peers.worker_engine"], log)
        try:
            process.ask(setup, LIMIT_S)
            process.ask({"texts": short_texts(-1)}, LIMIT_S)
            times = process.ask({"texts": short_texts(seed)}, LIMIT_S)["seconds"]
            return 1000 * float(statistics.median(times))
        finally:
            process.stop()


async def waits(address: str, seed: int, *, loaded: bool) -> float:
    """Return the p99 of milliseconds of short texts, one after another."""
    target, rng, times, stops = Target.parse(address), random.Random(seed), [], asyncio.Event()

    async def send(text: str) -> float:
        began = time.monotonic()
        body = {"input": text, "encoding_format": "base64"}
        found = (await exchange(target, "/v1/embeddings", body, limit_s=300)).completion()
        if found.error:
            raise RuntimeError(f"{found.error}: {found.message}")
        return 1000 * (time.monotonic() - began)

    async def load() -> None:
        while not stops.is_set():
            await send(words(rng, LONG))

    clients = [asyncio.create_task(load()) for _ in range(LONG_CLIENTS if loaded else 0)]
    if clients:
        await asyncio.sleep(1)
    for text in short_texts(seed):
        times.append(await send(text))
    stops.set()
    await asyncio.gather(*clients)
    return float(np.percentile(times, 99))


def cross_encoder(folder: Path, out: Path) -> Path:
    """Write a cross-encoder with the encoder's weights and a random head of one label."""
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (folder / name).exists():
            shutil.copy(folder / name, out / name)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"bert.{name.removeprefix('bert.')}": each for name, each in tensors.items()}
    generator = torch.Generator().manual_seed(0)
    hidden = config["hidden_size"]
    tensors["classifier.weight"] = torch.randn(1, hidden, generator=generator) * hidden**-0.5
    tensors["classifier.bias"] = torch.zeros(1)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    check_model(str(options.model))
    torch.set_num_threads(options.threads)
    home = environment(SENTENCES, options.environments.absolute())
    command = [str(home / "bin" / "python"), "-m", "loadtest.peers.worker_encoder"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = Process(command, log)
        stack.callback(process.stop)
        yield from _tables(options, stack, Peers(process))


def _tables(options: Namespace, stack: ExitStack, peers: Peers) -> Iterator[Table]:
    folder = options.model.absolute()
    dtype = str(select_dtype(options.dtype, torch.device("cpu"))).removeprefix("torch.")
    flags = ["--dtype", dtype, "--threads", str(options.threads), "--max-queue-wait", "60"]
    pair_folder = cross_encoder(
        folder, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pairs"
    )
    yield _throughput(folder, flags, peers, options.rounds)
    yield _one_text(folder, options, peers)

    def wait(number: int, *, loaded: bool) -> float:
        with Penstock(folder, flags) as server:
            rate(server.address, "/v1/embeddings", bodies_of(texts(0), at_once=False), CLIENTS)
            return asyncio.run(waits(server.address, number, loaded=loaded))

    ways = {"alone": partial(wait, loaded=False), "with 8 long ones": partial(wait, loaded=True)}
    bound = Bound("with 8 long ones", "alone", 3.0, at_most=True)
    found = in_turn(ways, options.rounds)
    yield Table(found, "p99 of a short text over HTTP, ms", ("alone",), (bound,))

    def scored(number: int) -> float:
        with Penstock(pair_folder, flags) as server:
            for seed in (2 * number + 1, 2 * number):
                given = pairs(seed)
                body = {"text_1": [a for a, _ in given], "text_2": [b for _, b in given]}
                found = rate(server.address, "/v1/score", [body], 1)
            return found

    theirs = partial(peers.rate, "cross-encoder bf16", pair_folder, of_pairs=True)
    found = in_turn({"one request": scored, ST: theirs}, options.rounds)
    yield Table(found, "pairs/s", (ST,), (Bound("one request", ST, 1.2),))


def _throughput(folder: Path, flags: list[str], peers: Peers, rounds: int) -> Table:
    def ours(number: int, *, at_once: bool) -> float:
        clients = 1 if at_once else CLIENTS
        with Penstock(folder, flags) as server:  # stopped before another uses its cores
            for seed in (2 * number + 1, 2 * number):
                bodies = bodies_of(texts(seed), at_once=at_once)
                found = rate(server.address, "/v1/embeddings", bodies, clients)
            return found

    ways: dict[str, Callable[[int], float]] = {
        f"{CLIENTS} clients": partial(ours, at_once=False),
        "one request": partial(ours, at_once=True),
    }
    cosines = {way: peers.lowest_cosine(way, folder) for way in (ST, *ORT_SETTINGS)}
    ways |= {way: partial(peers.rate, way, folder) for way in (ST, *ORT_SETTINGS)}
    found = in_turn(ways, rounds)
    exact = [way for way in ORT_SETTINGS if cosines[way] >= EXACT]
    fastest = max(exact, key=lambda way: statistics.median(found[way]))
    bounds = (
        Bound("one request", ST, 1.3),
        Bound("one request", fastest, 1.2),
        Bound(f"{CLIENTS} clients", "one request", 0.7),
    )
    notes = {way: f"lowest cosine to fp32 {cosine:.4f}" for way, cosine in cosines.items()}
    return Table(found, "texts/s", ("one request", ST, fastest), bounds, notes)


def _one_text(folder: Path, options: Namespace, peers: Peers) -> Table:
    setup = {"model": str(folder), "dtype": options.dtype, "threads": options.threads}

    def theirs(number: int, way: str) -> float:
        peers.milliseconds(way, folder, short_texts(-1))
        return peers.milliseconds(way, folder, short_texts(number))

    ways: dict[str, Callable[[int], float]] = {
        "engine, without HTTP": partial(own_milliseconds, setup),
        **{way: partial(theirs, way=way) for way in (ORT, ST)},
    }
    found = in_turn(ways, options.rounds)
    bound = Bound("engine, without HTTP", ORT, 1.3, at_most=True)
    return Table(found, f"ms of one text of {SHORT} words", (ORT,), (bound,))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a BERT sentence encoder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))


CASE = Case(__doc__ or "", add_options, measure)
