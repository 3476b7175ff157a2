"""Measure prefix affinity: the prefix cache hits of two replicas behind Ray Serve, by routing.

The Mooncake conversation trace is routed by prefix, at random and to the least loaded replica.
A block of 512 tokens in the trace becomes one KV block of 16 tokens, and other lengths shrink by
the same factor. Prompts of more than LONGEST tokens are left out. A closed loop of
CLIENTS sends the requests in the trace's order. `usage` reports the cached tokens of each prompt.

Run with an interpreter that has the extra [ray]: python -m loadtest.ray_affinity TRACE.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.http_client import closed_loop, streamed
from loadtest.program import run_program
from loadtest.schedule import DEMO_VOCABULARY, asks
from loadtest.servers import free_ports
from loadtest.traces import MOONCAKE_BLOCK
from loadtest.workload import Scale, workload

BLOCK = 16  # tokens of one KV block, and of one block of the trace
REPLICAS = 2
CLIENTS = 16
LONGEST = 1023  # tokens of a prompt
STOP_S = 120


def bodies(trace: Path, count: int, seed: int) -> list[dict[str, Any]]:
    scale = Scale(BLOCK / MOONCAKE_BLOCK, BLOCK / MOONCAKE_BLOCK)
    found = asks(workload(str(trace), scale, LONGEST), DEMO_VOCABULARY, seed)
    return [streamed(ask.body) for ask in itertools.islice(found, count)]


@contextlib.contextmanager
def cluster(routing: str, kv_blocks: int) -> Iterator[str]:
    """Run `python -m deploy.ray` on a free port of the loopback address; yield the address."""
    [port] = free_ports(1)
    settings = {
        "threads": 1,
        "port": port,
        "min_replicas": REPLICAS,
        "max_replicas": REPLICAS,
        "block_size": BLOCK,
        "num_gpu_blocks_override": kv_blocks,
        "log_level": "warning",
        "routing": routing,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.ray", *(f"{k}={v}" for k, v in settings.items())],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        if not any("Ray Serve listens" in line for line in process.stderr):  # ends with the process
            raise SystemExit("Ray Serve did not start; run `python -m deploy.ray` to see why")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=STOP_S)


def measure(routing: str, requests: list[dict[str, Any]], kv_blocks: int) -> dict[str, float]:
    with cluster(routing, kv_blocks) as address:
        wall, done = asyncio.run(closed_loop(address, "/v1/completions", requests, CLIENTS))
    asked = sum(completion.prompt_tokens for completion in done)
    found = sum(completion.cached_tokens for completion in done)
    ttft = sorted(c.arrivals[0] - c.started for c in done if c.arrivals)
    return {
        "hit_rate": found / asked,
        "prompt_tokens": asked,
        "cached_tokens": found,
        "seconds": wall,
        "ttft_p50_s": ttft[len(ttft) // 2],
    }


def ideal(requests: list[dict[str, Any]]) -> float:
    """Return the hit rate of a single cache that never evicts."""
    seen: set[tuple[int, ...]] = set()
    asked = found = 0
    for request in requests:
        ids = request["prompt"]
        asked += len(ids)
        prefixes = [tuple(ids[:end]) for end in range(BLOCK, len(ids), BLOCK)]
        found += BLOCK * sum(1 for _ in itertools.takewhile(seen.__contains__, prefixes))
        seen.update(prefixes)
    return found / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-blocks", type=int, default=4096, help="KV blocks of each replica")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    results: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        requests = bodies(options.trace, options.requests, seed=number)
        for routing in ("prefix", "random", "least-loaded"):
            figures = measure(routing, requests, options.kv_blocks)
            figures["load_1min"] = os.getloadavg()[0]
            results.setdefault(routing, []).append(figures)
            print(f"round {number} {routing}: {figures}", flush=True)
    report = {
        "command": f"python -m loadtest.ray_affinity {options.trace.name} "
        f"--requests {options.requests} --rounds {options.rounds} --kv-blocks {options.kv_blocks}",
        "date": time.strftime("%Y-%m-%d"),
        "ideal_hit_rate": ideal(requests),
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"a single cache that never evicts: {report['ideal_hit_rate']:.1%}")


if __name__ == "__main__":
    run_program(main)
