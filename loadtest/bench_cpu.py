"""`make bench`: tokens/s over HTTP beside `transformers` generate, same model, same run.

A 125M Llama with random weights, prompts of 128 tokens, 64 new ones, greedy, no early end, both in
the dtype that Penstock takes on this CPU. Rounds of all alternate, so that a drift of the machine's
speed meets each; medians are printed. Penstock runs twice, with its attention in torch and compiled
by Numba, where that is installed. transformers runs in process with its whole batch given at once,
which flatters it: no HTTP, no scheduling, no streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from engine.layers.linear import PackedWeight
from engine.platform import DTYPES, onednn_multiplies, select_dtype
from loadtest.http_client import closed_loop
from loadtest.random_model import LLAMA_125M, write_random_llama


@dataclass(frozen=True)
class Load:
    """Tokens of each request."""

    prompt: int
    new: int

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(300, 32000, (count, self.prompt), generator=generator).tolist()


Figures = tuple[float, float]  # output tokens/s, and the median gap in ms
BACKENDS = {"penstock": "torch", "numba": "numba"}  # what the report calls Penstock with each


class Penstock:
    """`penstock serve` on a free port of the loopback address."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "server", "serve", str(folder), "--port", str(self.port)]
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--log-level", "warning", *flags], stderr=subprocess.DEVNULL
        )
        try:
            self._wait_ready(began + 120)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began

    def _wait_ready(self, deadline: float) -> None:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("penstock did not become ready") from None
                time.sleep(0.05)

    def measure(self, load: Load, concurrency: int, requests: int, seed: int) -> Figures:
        """Output tokens/s and the median gap in ms."""
        bodies = [
            {"prompt": p, "max_tokens": load.new, "temperature": 0, "ignore_eos": True}
            for p in load.prompts(requests, seed)
        ]
        wall, done = asyncio.run(closed_loop("127.0.0.1", self.port, bodies, concurrency))
        assert all(c.tokens == load.new for c in done), "a request came back short"
        gaps = [gap for c in done for gap in c.gaps]
        return sum(c.tokens for c in done) / wall, statistics.median(gaps) * 1e3

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


class Transformers:
    """`generate` in this process, a static batch, in the dtype of ours."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):  # type: ignore[misc]
            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: Any) -> None:
                self.times.append(time.monotonic())

            def end(self) -> None: ...

        self.clock = Clock
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def measure(self, load: Load, batch: int, seed: int) -> Figures:
        ids = torch.tensor(load.prompts(batch, seed))
        clock = self.clock()
        began = time.monotonic()
        # generate streams only single sequences; longer batches are timed as a whole.
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=load.new,
                min_new_tokens=load.new,
                do_sample=False,
                pad_token_id=0,
                streamer=clock if batch == 1 else None,
            )
        wall = time.monotonic() - began
        assert out.shape[1] == load.prompt + load.new
        gaps = [b - a for a, b in zip(clock.times[1:], clock.times[2:], strict=False)]
        return batch * load.new / wall, (statistics.median(gaps) if gaps else wall / load.new) * 1e3


def matmul_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a matmul of the model's shape, the faster of torch's two: what this machine's
    arithmetic is worth."""
    rows, inner, outer = 128, 576, 3072
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    ways: list[Callable[[], torch.Tensor]] = [lambda: torch.nn.functional.linear(x, weight)]
    if onednn_multiplies(x.device, dtype):
        packed = PackedWeight(weight)
        ways.append(lambda: packed(x))
    best = float("inf")
    for multiply in ways * 50:
        began = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - began)
    return 2 * rows * inner * outer / best / 1e9


def read_rate() -> float:
    """GB/s at which both cores together read memory that no cache holds."""
    data = torch.ones(2**27)  # 512 MiB
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return data.nbytes / best / 1e9


def weight_rate(dtype: torch.dtype) -> float:
    """GB/s at which one row is multiplied by weights of the model's shape that no cache holds, by
    what multiplies without Numba."""
    outer, inner = 3072, 576
    count = 2**29 // (outer * inner * dtype.itemsize)
    x, weights = torch.ones(1, inner, dtype=dtype), torch.ones(count, outer, inner, dtype=dtype)
    packs = onednn_multiplies(x.device, dtype)
    layers: list[Callable[[torch.Tensor], torch.Tensor]] = [
        PackedWeight(weight) if packs else partial(torch.nn.functional.linear, weight=weight)
        for weight in weights
    ]
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for layer in layers:
            layer(x)
        best = min(best, time.perf_counter() - began)
    return weights.nbytes / best / 1e9


def bound(load: Load, streams: int, gflops: float, gbytes: float, item: int) -> float:
    """Output tokens/s that no server can exceed here with numbers of `item` bytes.

    Prompts cost their multiplications; a step of decoding the larger of its multiplications and of
    reading all weights and the contexts' KV once.
    """
    c = {key: value for key, value in LLAMA_125M.items() if isinstance(value, int)}
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    attention = c["hidden_size"] * head_dim * (c["num_attention_heads"] + c["num_key_value_heads"])
    layer = 2 * attention + 3 * c["hidden_size"] * c["intermediate_size"]
    body, head = layer * c["num_hidden_layers"], c["hidden_size"] * c["vocab_size"]
    kv = 2 * item * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim  # bytes a token
    prefill = 2 * body * load.prompt * streams / (gflops * 1e9)
    read = (item * (body + head) + kv * streams * (load.prompt + load.new / 2)) / (gbytes * 1e9)
    step = max(2 * (body + head) * streams / (gflops * 1e9), read)
    return streams * load.new / (prefill + load.new * step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="of both")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--flags", default="", help="more flags for `penstock serve`")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are ended
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name) / "llama-125m"
        write_random_llama(folder, LLAMA_125M)
        report = run(folder, options)
    print_table(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate rounds of each at each concurrency; all figures of all rounds."""
    load, rows = Load(options.prompt, options.new), dict[str, Any]()
    dtype = select_dtype(options.dtype, torch.device("cpu"))
    name_of_dtype = str(dtype).removeprefix("torch.")
    rates: list[dict[str, float]] = []
    peer = None if options.no_peer else Transformers(folder, dtype)
    backends = BACKENDS if find_spec("numba") else {"penstock": "torch"}
    for round_number in range(options.rounds + 1):  # the first warms all up and is not counted
        rates.append(
            {
                "gflops": matmul_rate(dtype),
                "gbytes": read_rate(),
                "weight_gbytes": weight_rate(dtype),
            }
        )
        for concurrency in options.concurrency:
            row = rows.setdefault(
                str(concurrency), {name: [] for name in (*BACKENDS, "transformers")}
            )
            measured: dict[str, Figures] = {}
            for name, backend in backends.items():
                flags = ["--attention-backend", backend, "--dtype", name_of_dtype]
                flags += options.flags.split()
                measured[name], seconds = serve_and_measure(
                    folder, flags, load, concurrency, round_number
                )
                if round_number:
                    row.setdefault("start_seconds", {}).setdefault(name, []).append(seconds)
            if peer:
                measured["transformers"] = peer.measure(load, concurrency, seed=round_number)
            if round_number:
                for name, figures in measured.items():
                    row[name].append(figures)
            print(f"round {round_number} c={concurrency}: {measured}", flush=True)
    return {
        "cpu_count": os.cpu_count(),
        "torch": torch.__version__,
        "dtype": name_of_dtype,
        "machine": rates,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m loadtest.bench_cpu " + " ".join(sys.argv[1:]),
        "load": asdict(load),
        "rows": rows,
    }


def serve_and_measure(
    folder: Path, flags: list[str], load: Load, concurrency: int, seed: int
) -> tuple[Figures, float]:
    """Figures of a fresh server, and its seconds to start: an idle one would share the cores."""
    server = Penstock(folder, flags)
    try:
        server.measure(load, concurrency, concurrency, seed=999)
        figures = server.measure(load, concurrency, max(2, 2 * concurrency), seed)
    finally:
        server.stop()
    return figures, server.start_seconds


def print_table(report: dict[str, Any]) -> None:
    gflops, gbytes, weight_gbytes = (
        statistics.median(measured[key] for measured in report["machine"])
        for key in ("gflops", "gbytes", "weight_gbytes")
    )
    load = Load(**report["load"])
    names = {"penstock": "Penstock", "numba": "with Numba", "transformers": "transformers"}
    print(
        "\n| streams |",
        " tok/s · gap | ".join(names.values()),
        "tok/s · gap | ratios | of the bound |",
    )
    print("|---" * 6 + "|")
    for streams, row in report["rows"].items():
        rates, cells = {}, {}
        for name in names:
            if row[name]:
                measured, gaps = map(statistics.median, zip(*row[name], strict=True))
                rates[name], cells[name] = measured, f"{measured:.0f} · {gaps:.1f} ms"
        peer = rates.pop("transformers", None)
        limit = bound(load, int(streams), gflops, gbytes, DTYPES[report["dtype"]].itemsize)
        ratios = " · ".join(f"{rate / peer:.1f}" for rate in rates.values()) if peer else ""
        shares = " · ".join(f"{rate / limit:.0%}" for rate in rates.values())
        print("|", " | ".join([streams, *(cells.get(n, "") for n in names), ratios, shares]), "|")
    print(
        f"\n{report['dtype']} matmul {gflops:.0f} GFLOP/s, memory read at {gbytes:.1f} GB/s, "
        f"weights for one row at {weight_gbytes:.1f} GB/s: medians of the run."
    )


if __name__ == "__main__":
    main()
