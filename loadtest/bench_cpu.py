"""`make bench`: compare tokens/s over HTTP with `transformers` generate in the same run.

The model is a 125M Llama with random weights. Prompts have 128 tokens, answers have 64, greedy and
without EOS. All contenders use the dtype that Penstock selects on this CPU. Their rounds alternate,
so that changes in the machine's speed affect all of them. Medians are printed.

Penstock runs as installed and, as a reference, with torch's operations instead of Numba's kernels.
transformers runs in this process and gets its whole batch at once. This favours it: it has no HTTP,
no scheduling and no streams.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.device.facts import DTYPES, onednn_has_matmul, select_dtype
from engine.layers.weights.onednn import PackedWeight
from loadtest.contenders import Figures, Load, Transformers, over_http
from loadtest.program import run_program
from loadtest.random_model import LLAMA_125M, write_random_model
from loadtest.servers import Penstock, Server

BACKENDS = {"penstock": "auto", "torch": "torch"}  # name in the report: attention backend
TITLES = {
    "penstock": "Penstock",
    "torch": "with torch alone",
    "transformers": "transformers",
}
Measure = Callable[[int, int], Figures]  # (number of streams, round) -> figures


def matmul_rate(dtype: torch.dtype) -> float:
    """Return the GFLOP/s of a matmul of the model's shape, by the faster of torch's two methods."""
    rows, inner, outer = 128, 576, 3072
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    ways: list[Callable[[], torch.Tensor]] = [lambda: torch.nn.functional.linear(x, weight)]
    if onednn_has_matmul(x.device, dtype):
        packed = PackedWeight(weight)
        ways.append(lambda: packed(x))
    best = min(min(timeit.repeat(way, number=1, repeat=50)) for way in ways)
    return 2 * rows * inner * outer / best / 1e9


def read_rate() -> float:
    """Return the GB/s at which all threads together read memory that is in no cache."""
    data = torch.ones(2**27)  # 512 MiB
    return data.nbytes / min(timeit.repeat(data.sum, number=1, repeat=5)) / 1e9


def weight_rate(dtype: torch.dtype) -> float:
    """Return the GB/s at which torch multiplies one row by weights that are in no cache.

    The weights have a shape of the model. The method is oneDNN, not our kernels.
    """
    outer, inner = 3072, 576
    count = 2**29 // (outer * inner * dtype.itemsize)
    x, weights = torch.ones(1, inner, dtype=dtype), torch.ones(count, outer, inner, dtype=dtype)
    packs = onednn_has_matmul(x.device, dtype)
    layers: list[Callable[[torch.Tensor], torch.Tensor]] = [
        PackedWeight(weight) if packs else partial(torch.nn.functional.linear, weight=weight)
        for weight in weights
    ]

    def multiply() -> None:
        for layer in layers:
            layer(x)

    return weights.nbytes / min(timeit.repeat(multiply, number=1, repeat=5)) / 1e9


class Counts(NamedTuple):
    """Weights that a token is multiplied by: in all layers, in the LM head; and KV values."""

    body: int
    head: int
    kv: int  # of a token in all layers


def counts(config: Mapping[str, object]) -> Counts:
    """Return the counts of a Llama with this config, or of an LFM2, which has `layer_types`."""
    c = {key: value for key, value in config.items() if isinstance(value, int)}
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads", heads)
    head_dim = c.get("head_dim", c["hidden_size"] // heads)
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    kinds = config.get("layer_types")
    convolving = kinds.count("conv") if isinstance(kinds, list) else 0
    attending = layers - convolving
    mixing = attending * 2 * hidden * head_dim * (heads + kv_heads)
    mixing += convolving * hidden * (4 * hidden + c.get("conv_L_cache", 0))
    body = mixing + layers * 3 * hidden * c["intermediate_size"]
    return Counts(body, hidden * c["vocab_size"], 2 * attending * kv_heads * head_dim)


def bound(
    load: Load,
    streams: int,
    gflops: float,
    gbytes: float,
    item: int,
    config: Mapping[str, object] = LLAMA_125M,
) -> float:
    """Return an upper bound on output tokens/s on this machine with elements of `item` bytes.

    `config` is a Llama's. Prefill takes the time of its multiplications. A decode step takes the
    time of its multiplications, or of reading all weights and the KV cache once if that is longer.
    """
    body, head, kv = counts(config)
    prefill = 2 * body * load.prompt * streams / (gflops * 1e9)
    values = body + head + kv * streams * (load.prompt + load.new / 2)
    read = item * values / (gbytes * 1e9)
    step = max(2 * (body + head) * streams / (gflops * 1e9), read)
    return streams * load.new / (prefill + load.new * step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument(
        "--dtype", choices=["auto", *DTYPES], default="auto", help="dtype of all contenders"
    )
    parser.add_argument("--no-peer", action="store_true", help="do not run transformers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--flags", default="", help="additional flags for `penstock serve`")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name) / "llama-125m"
        write_random_model(folder, LLAMA_125M)
        report = run(folder, options)
    print_table(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate rounds of all contenders at each concurrency; return the figures of every round."""
    load = Load(options.prompt, options.new)
    dtype = select_dtype(options.dtype, torch.device("cpu"))
    name_of_dtype = str(dtype).removeprefix("torch.")
    rates: list[dict[str, float]] = []
    starts: dict[str, list[float]] = {}
    measures = contenders(folder, options, load, dtype, starts)
    rows = {str(c): {name: list[Figures]() for name in measures} for c in options.concurrency}
    for round_number in range(options.rounds + 1):  # round 0 is a warm-up and is not counted
        rates.append(
            {
                "gflops": matmul_rate(dtype),
                "gbytes": read_rate(),
                "weight_gbytes": weight_rate(dtype),
            }
        )
        for concurrency in options.concurrency:
            measured = {n: measure(concurrency, round_number) for n, measure in measures.items()}
            for name, figures in measured.items() if round_number else ():
                rows[str(concurrency)][name].append(figures)
            print(f"round {round_number} c={concurrency}: {measured}", flush=True)
    return {
        "cpu_count": os.cpu_count(),
        "torch": torch.__version__,
        "dtype": name_of_dtype,
        "machine": rates,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m loadtest.bench_cpu " + " ".join(sys.argv[1:]),
        "load": asdict(load),
        "start_seconds": starts,
        "rows": rows,
    }


def contenders(
    folder: Path,
    options: argparse.Namespace,
    load: Load,
    dtype: torch.dtype,
    starts: dict[str, list[float]],
) -> dict[str, Measure]:
    """Return the contenders by name. `starts` collects the startup seconds of each server."""

    def served(name: str, make: Callable[[int], Server]) -> Measure:
        def fresh(streams: int, round_number: int) -> Figures:
            """Measure with a new server; idle servers of other rounds would use the cores, too."""
            with make(streams) as server:
                if round_number:  # in round 0, kernels may be compiled
                    starts.setdefault(name, []).append(server.start_seconds)
                over_http(server, load, streams, streams, seed=999)
                return over_http(server, load, streams, max(2, 2 * streams), round_number)

        return fresh

    def penstock(backend: str) -> Callable[[int], Server]:
        flags = ["--attention-backend", backend, "--dtype", str(dtype).removeprefix("torch.")]
        flags += ["--speculation", "off"]  # random weights repeat themselves too often
        return lambda streams: Penstock(folder, flags + options.flags.split())

    found = {name: served(name, penstock(backend)) for name, backend in BACKENDS.items()}
    if not options.no_peer:
        found["transformers"] = partial(Transformers(folder, dtype).measure, load)
    return found


def print_table(report: dict[str, Any]) -> None:
    gflops, gbytes, weight_gbytes = (
        statistics.median(measured[key] for measured in report["machine"])
        for key in ("gflops", "gbytes", "weight_gbytes")
    )
    load = Load(**report["load"])
    names = [name for name in TITLES if all(name in row for row in report["rows"].values())]
    print(
        "\n| streams |",
        " tok/s · gap | ".join(TITLES[name] for name in names),
        "tok/s · gap | ratios | of the bound |",
    )
    print("|---" * (3 + len(names)) + "|")
    for streams, row in report["rows"].items():
        rates, cells = dict[str, float](), list[str]()
        for name in names:
            rates[name], gap = map(statistics.median, zip(*row[name], strict=True))
            cells.append(f"{rates[name]:.0f} · {gap:.1f} ms")
        peer = rates.pop("transformers", None)
        limit = bound(load, int(streams), gflops, gbytes, DTYPES[report["dtype"]].itemsize)
        ratios = " · ".join(f"{rate / peer:.1f}" for rate in rates.values()) if peer else ""
        shares = " · ".join(f"{rate / limit:.0%}" for rate in rates.values())
        print("|", " | ".join([streams, *cells, ratios, shares]), "|")
    print(
        f"\n{report['dtype']} matmul {gflops:.0f} GFLOP/s, memory read at {gbytes:.1f} GB/s, "
        f"weights for one row at {weight_gbytes:.1f} GB/s (medians of the run)."
    )


if __name__ == "__main__":
    run_program(main)
