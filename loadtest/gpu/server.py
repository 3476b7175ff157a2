"""The nano workload over HTTP and by `transformers`: the cost of HTTP, and a comparison.

Clients run in separate processes, so that a single Python loop does not have to read all streams.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from loadtest.gpu.bench import NANO_MODEL, Bench, Row
from loadtest.http_client import closed_loop, streamed
from loadtest.servers import Penstock

CLIENTS = 8


def http(bench: Bench) -> list[Row]:
    """Measure startup, and the nano workload streamed over HTTP and by the engine alone."""
    works, folder = bench.nano_works(), bench.model(NANO_MODEL)
    tokens, clients = sum(work.max_tokens for work in works), 1 if bench.smoke else CLIENTS
    flags = {
        "device": bench.device,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "speculation": "off",
        **bench.nano_limits(works),
        "threads": 1 if bench.smoke else CLIENTS,
    }
    bodies = [
        {
            "prompt": work.prompt,
            "max_tokens": work.max_tokens,
            "temperature": work.temperature,
            "ignore_eos": True,
            "seed": number,
        }
        for number, work in enumerate(works)
    ]
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    with Penstock(folder, [*arguments, "--no-enable-prefix-caching"]) as server:
        ready = server.start_seconds
        _stream_all(server.address, bodies[:CLIENTS], clients)
        over_http = _stream_all(server.address, bodies, clients)
    engine = bench.engine(NANO_MODEL, **bench.nano_limits(works))
    engine.generate(works[:CLIENTS])
    alone = engine.generate(works)
    return [
        Row("0.6B, start to ready", ready, "s", 10, True),
        Row("0.6B, nano workload over HTTP", tokens / over_http, "tok/s"),
        Row("throughput lost to HTTP", 100 * (1 - alone / over_http), "%", 5, True),
    ]


def _stream_all(address: str, bodies: list[dict[str, Any]], clients: int) -> float:
    """Send all requests at once and return the seconds until the last one has ended."""
    shares = [bodies[i::clients] for i in range(clients)]
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
        list(pool.map(_stream, [address] * clients, [bodies[:0]] * clients))  # import everything
        began = time.monotonic()
        list(pool.map(_stream, [address] * clients, shares))
        return time.monotonic() - began


def _stream(address: str, bodies: list[dict[str, Any]]) -> None:
    asyncio.run(closed_loop(address, "/v1/completions", map(streamed, bodies), len(bodies)))


def peer(bench: Bench) -> list[Row]:
    """Measure the nano workload with `transformers` continuous batching, on the same shape."""
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

    works = bench.nano_works()
    config = Qwen3Config.from_pretrained(bench.model(NANO_MODEL))
    attention = "paged|sdpa"
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
    # generate_batch takes a single output length; the mean gives the same total number of tokens.
    mean = sum(work.max_tokens for work in works) // len(works)
    settings = GenerationConfig(
        max_new_tokens=mean, do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0
    )
    warm = GenerationConfig(max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
    limits: dict[str, Any] = {}
    if bench.smoke:  # otherwise its cache takes, and fills, most of the machine's memory
        from transformers import ContinuousBatchingConfig

        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        limits["continuous_batching_config"] = small
    model.generate_batch(inputs=[list(works[0].prompt)], generation_config=warm, **limits)
    began = time.monotonic()
    outputs = model.generate_batch(
        inputs=[list(work.prompt) for work in works], generation_config=settings, **limits
    )
    seconds = time.monotonic() - began
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return [Row("transformers continuous batching", tokens / seconds, "tok/s", note=attention)]
