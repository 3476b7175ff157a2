"""`make bench`: tokens/s over HTTP beside `transformers` generate, same model, same run.

A 125M Llama with random weights, prompts of 128 tokens, 64 new ones, greedy, no early end. Rounds
of the two alternate, so that a drift of the machine's speed meets both; medians are printed.
transformers runs in process with its whole batch given at once, which flatters it: no HTTP, no
scheduling, no streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from loadtest.http_client import closed_loop
from loadtest.random_model import LLAMA_125M, write_random_llama

PROMPT, NEW = 128, 64


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, 32000, (count, PROMPT), generator=generator).tolist()


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
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5).close()
                break
            except OSError:
                if self.process.poll() is not None or time.monotonic() - began > 120:
                    raise SystemExit("penstock did not become ready") from None
                time.sleep(0.05)
        self.start_seconds = time.monotonic() - began

    def measure(self, concurrency: int, requests: int, seed: int) -> tuple[float, float]:
        """Output tokens/s and the median gap in ms."""
        bodies = [
            {"prompt": p, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            for p in prompts(requests, seed)
        ]
        wall, done = asyncio.run(closed_loop("127.0.0.1", self.port, bodies, concurrency))
        assert all(c.tokens == NEW for c in done), "a request came back short"
        gaps = [gap for c in done for gap in c.gaps]
        return sum(c.tokens for c in done) / wall, statistics.median(gaps) * 1e3

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


class Transformers:
    """`generate` in this process, a static batch, bf16 like ours."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):  # type: ignore[misc]
            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: Any) -> None:
                self.times.append(time.monotonic())

            def end(self) -> None: ...

        self.clock = Clock
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def measure(self, batch: int, seed: int) -> tuple[float, float]:
        ids = torch.tensor(prompts(batch, seed))
        clock = self.clock()
        began = time.monotonic()
        # generate streams only single sequences; longer batches are timed as a whole.
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
                streamer=clock if batch == 1 else None,
            )
        wall = time.monotonic() - began
        assert out.shape[1] == PROMPT + NEW
        gaps = [b - a for a, b in zip(clock.times[1:], clock.times[2:], strict=False)]
        return batch * NEW / wall, (statistics.median(gaps) if gaps else wall / NEW) * 1e3


def matmul_rate() -> float:
    """GFLOP/s of a bf16 matmul of the model's shape: what this machine's arithmetic is worth."""
    rows, inner, outer = 128, 576, 3072
    x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(outer, inner).bfloat16()
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        torch.nn.functional.linear(x, weight)
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


def bound(streams: int, gflops: float, gbytes: float) -> float:
    """Output tokens/s that no server can exceed here in bf16.

    Prompts cost their multiplications; a step of decoding the larger of its multiplications and of
    reading all weights and the contexts' KV once.
    """
    c = {key: value for key, value in LLAMA_125M.items() if isinstance(value, int)}
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    attention = c["hidden_size"] * head_dim * (c["num_attention_heads"] + c["num_key_value_heads"])
    layer = 2 * attention + 3 * c["hidden_size"] * c["intermediate_size"]
    body, head = layer * c["num_hidden_layers"], c["hidden_size"] * c["vocab_size"]
    kv = 2 * 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim  # bytes a token
    prefill = 2 * body * PROMPT * streams / (gflops * 1e9)
    read = (2 * (body + head) + kv * streams * (PROMPT + NEW / 2)) / (gbytes * 1e9)
    step = max(2 * (body + head) * streams / (gflops * 1e9), read)
    return streams * NEW / (prefill + NEW * step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--flags", default="", help="more flags for `penstock serve`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name) / "llama-125m"
        write_random_llama(folder, LLAMA_125M)
        report = run(folder, options)
    print_table(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate rounds of the two at each concurrency; all figures of all rounds."""
    rows: dict[str, Any] = {}
    rates: list[tuple[float, float]] = []
    peer = None if options.no_peer else Transformers(folder)
    for round_number in range(options.rounds + 1):  # the first warms both up and is not counted
        rates.append((matmul_rate(), read_rate()))
        for concurrency in options.concurrency:
            row = rows.setdefault(str(concurrency), {"penstock": [], "transformers": []})
            # A fresh server each time: an idle one must not share the cores with the peer.
            server = Penstock(folder, options.flags.split())
            requests = max(2, 2 * concurrency)
            try:
                server.measure(concurrency, concurrency, seed=999)
                ours = server.measure(concurrency, requests, seed=round_number)
            finally:
                server.stop()
            theirs = peer.measure(concurrency, seed=round_number) if peer else None
            if round_number:
                row["penstock"].append(ours)
                row.setdefault("start_seconds", []).append(server.start_seconds)
                if theirs:
                    row["transformers"].append(theirs)
            print(f"round {round_number} c={concurrency}: ours {ours}, peer {theirs}", flush=True)
    return {
        "cpu_count": os.cpu_count(),
        "torch": torch.__version__,
        "machine": [{"gflops": gflops, "gbytes": gbytes} for gflops, gbytes in rates],
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m loadtest.bench_cpu " + " ".join(sys.argv[1:]),
        "rows": rows,
    }


def print_table(report: dict[str, Any]) -> None:
    gflops, gbytes = (
        statistics.median(measured[key] for measured in report["machine"])
        for key in ("gflops", "gbytes")
    )
    print("\n| streams | Penstock tok/s · gap | of the bound | transformers tok/s · gap | ratio |")
    print("|---|---|---|---|---|")

    def medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
        rates, gaps = zip(*pairs, strict=True)
        return statistics.median(rates), statistics.median(gaps)

    for concurrency, row in report["rows"].items():
        rate, gap = medians(row["penstock"])
        share = rate / bound(int(concurrency), gflops, gbytes)
        cells = f"| {concurrency} | {rate:.0f} · {gap:.1f} ms | {share:.0%} "
        if row["transformers"]:
            peer_rate, peer_gap = medians(row["transformers"])
            cells += f"| {peer_rate:.0f} · {peer_gap:.1f} ms | {rate / peer_rate:.1f} |"
        else:
            cells += "| | |"
        print(cells)
    print(
        f"\nbf16 matmul {gflops:.0f} GFLOP/s, memory read at {gbytes:.1f} GB/s: medians of the run."
    )


if __name__ == "__main__":
    main()
