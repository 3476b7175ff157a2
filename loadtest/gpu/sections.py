"""The measurements of loadtest.gpu, each in a separate process, which frees all its memory.

`python -m loadtest.gpu.sections NAME` prints its rows as JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from loadtest.gpu.ablations import ablations
from loadtest.gpu.bench import NANO_MODEL, Bench, Row
from loadtest.gpu.chain import chain, prompts
from loadtest.gpu.codes import quantised
from loadtest.gpu.device import attention, ceilings, ledger
from loadtest.gpu.models import Chip
from loadtest.gpu.server import http, peer
from loadtest.gpu.sweeps import sweep_attention, sweep_linear
from loadtest.gpu.timeline import idle, timeline
from loadtest.program import run_program


def nano(bench: Bench) -> list[Row]:
    """Measure the workload of nano-vllm's benchmark: 256 sequences of 100 to 1,024 tokens."""
    works = bench.nano_works()
    engine = bench.engine(NANO_MODEL, **bench.nano_limits(works))
    engine.generate(works[: len(works) // 8])
    engine.settle()
    seconds = statistics.median(engine.generate(works) for _ in range(1 if bench.smoke else 3))
    rate = sum(work.max_tokens for work in works) / seconds
    prompts, outputs = [len(w.prompt) for w in works], [w.max_tokens for w in works]
    floor = bench.shape(NANO_MODEL).offline_seconds(prompts, outputs, bench.chip)
    share = 100 * floor / seconds
    rows = [Row("0.6B, nano workload", rate, "tok/s")]
    return [*rows, Row("0.6B, nano workload, share of the bound", share, "%", 70)]


# Goals are shares of the bound that the chip's measured rates set. {model: {batch: percent}}
DECODE_GOALS = {
    "llama-3.1-8b": dict.fromkeys((1, 8, 32, 64, 128, 256), 80.0),
    "qwen3-0.6b": {1: 45.0},
}


def decode(bench: Bench, model: str, batches: tuple[int, ...]) -> list[Row]:
    """Measure steady decoding at context 1,024."""
    context, steps = (48, 8) if bench.smoke else (1024, 64)
    engine = bench.engine(
        model,
        max_num_seqs=max(batches),
        max_model_len=2 * context,
        max_num_batched_tokens=4096,
    )
    rows = []
    for batch in batches:
        works = bench.works(model, batch, context - steps // 2, context)
        gaps = engine.decode_seconds(works, steps)
        rate = batch / statistics.mean(gaps)
        least = bench.shape(model).decode_seconds([context] * batch, bench.chip)
        rows.append(Row(f"{model}, decode, batch {batch}", rate, "tok/s"))
        share = 100 * least * rate / batch
        goal = DECODE_GOALS.get(model, {}).get(batch)
        rows.append(Row(f"{model}, decode, batch {batch}, share of the bound", share, "%", goal))
        if batch == 256:
            tail = sorted(gaps)[int(len(gaps) * 0.99)] / statistics.median(gaps)
            rows.append(Row(f"{model}, 256 streams, p99 over median gap", tail, "x", 1.5, True))
    return rows


def prefill(bench: Bench) -> list[Row]:
    """Measure prefill: one prompt at a time, until its first token is on the host."""
    model, lengths = "llama-3.1-8b", (32,) if bench.smoke else (1024, 2048, 4096, 8192)
    engine = bench.engine(
        model, max_num_seqs=4, max_model_len=2 * lengths[-1], max_num_batched_tokens=lengths[-1]
    )
    engine.settle()
    rows = []
    for length in lengths:
        works = bench.works(model, 1, length, 1)
        engine.generate(works)
        seconds = statistics.median(engine.generate(works) for _ in range(5))
        rate = bench.shape(model).prefill_flops(length) / seconds
        share = 100 * rate / bench.chip.matmul
        rows.append(Row(f"8B, prefill of {length}", share, "% of matmul", 65))
        rows.append(Row(f"8B, first token after {length}", seconds * 1e3, "ms"))
    return rows


ALL = (1, 8, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Section:
    """A measurement, and the seconds after which it is stopped."""

    measure: Callable[[Bench], list[Row]]
    seconds: float


CHECK: dict[str, Section] = {
    "ceilings": Section(ceilings, 40),
    "timeline": Section(timeline, 60),
    "attention": Section(attention, 50),
    "decode-8b": Section(lambda bench: decode(bench, "llama-3.1-8b", ALL), 90),
    "decode-0.6b": Section(lambda bench: decode(bench, "qwen3-0.6b", (1, 8, 64, 256)), 60),
    "nano": Section(nano, 80),
    "ledger": Section(ledger, 40),
    "prefill": Section(prefill, 60),
    "idle": Section(idle, 50),
    "http": Section(http, 70),
}
ABLATE: dict[str, Section] = {
    "chain": Section(chain, 150),
    "prompts": Section(prompts, 40),
    "sweep-linear": Section(sweep_linear, 120),
    "sweep-attention": Section(sweep_attention, 120),
    "quantised": Section(quantised, 90),
    "peer": Section(peer, 60),
    "decode-gemma-2b": Section(lambda bench: decode(bench, "gemma-2-2b", (1, 64)), 60),
    "decode-gemma-9b": Section(lambda bench: decode(bench, "gemma-2-9b", (1, 64)), 60),
    "ablations": Section(ablations, 240),
}
SECTIONS = CHECK | ABLATE
GROUPS = {"check": list(CHECK), "ablations": list(ABLATE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SECTIONS)
    parser.add_argument("--read", type=float, default=4.3e12, help="measured bytes/s")
    parser.add_argument("--matmul", type=float, default=790e12, help="measured FLOP/s")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--profile", type=Path, help="where the last trace is written")
    options = parser.parse_args()
    if options.smoke:
        torch.set_num_threads(1)  # several threads on shared cores would wait for each other
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            Chip(options.read, options.matmul), options.smoke, Path(folder), options.profile
        )
        rows = SECTIONS[options.name].measure(bench)
    print(json.dumps([asdict(row) for row in rows]), file=sys.stdout)


if __name__ == "__main__":
    run_program(main)
