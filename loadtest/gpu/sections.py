"""The measurements of loadtest.gpu, each in a separate process, which frees all its memory.

`python -m loadtest.gpu.sections NAME` prints its rows as JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C._autograd import DeviceType

from engine.kernels.triton import overlap
from engine.layers.attention import Attention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.ops.kernels import Kernels, use_kernels
from engine.sampling.sampler import draw_next
from loadtest.gpu.bench import NANO_MODEL, Bench, Row
from loadtest.gpu.codes import quantised
from loadtest.gpu.device import attention, ceilings, ledger
from loadtest.gpu.models import Chip
from loadtest.gpu.server import http, peer
from loadtest.gpu.sweeps import sweep_attention, sweep_linear
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


PAUSE = 5.0  # microseconds; shorter gaps lie between the kernels of one graph


def idle(bench: Bench) -> list[Row]:
    """Measure the time in which no kernel runs, over 30 decode steps of 256 sequences."""
    model, batch = "qwen3-0.6b", 4 if bench.smoke else 256
    context = 64 if bench.smoke else 1024
    engine = bench.engine(model, max_num_seqs=batch, max_model_len=context + 256)
    works = bench.works(model, batch, context, 200)
    if bench.smoke:
        engine.decode_seconds(works, 4)
        return []
    engine.decode_seconds(works, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.decode_seconds(works, 30)
    if bench.profile:
        profile.export_chrome_trace(str(bench.profile))
    events = [e for e in profile.events() or [] if e.device_type == DeviceType.CUDA]
    prompts_end = max(e.time_range.end for e in events if e.name == "extend_kernel")
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    between, inside = idle_shares(sorted(span for span in spans if span[0] > prompts_end))
    return [
        Row("0.6B, 256 streams, GPU idle between replays", between, "%", 2, True),
        Row("0.6B, 256 streams, gaps between kernels of a graph", inside, "%"),
    ]


def idle_shares(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (% of the time in gaps longer than PAUSE, % in shorter gaps) of sorted spans."""
    reach = begun = spans[0][0]
    long = short = 0.0
    for begin, end in spans:
        gap = max(0.0, begin - reach)
        if gap > PAUSE:
            long += gap
        else:
            short += gap
        reach = max(reach, end)
    total = reach - begun
    return 100 * long / total, 100 * short / total


@contextmanager
def layers_in_torch(*types: type[nn.Module]) -> Iterator[None]:
    """Let layers of these types compute with torch, in engines that are loaded in this context."""

    def use(module: nn.Module, kernels: Kernels) -> None:
        use_kernels(module, kernels)
        for layer in module.modules():
            if isinstance(layer, types):
                setattr(layer, "kernels", "torch")  # noqa: B010 - see use_kernels

    with mock.patch("engine.runner.load.use_kernels", use):
        yield


@contextmanager
def sampling_in_torch() -> Iterator[None]:
    """Let engines that are loaded and run in this context draw tokens with torch.

    Draws are always static, as in a captured step, so that the host reads nothing.
    """

    def draw_in_torch(*given: Any, static: bool, out: torch.Tensor | None) -> torch.Tensor:
        others: Any = given[:-1]  # the last one names the kernels
        return draw_next(*others, static=True, out=out)

    with mock.patch("engine.runner.sequence_rows.draw_next", draw_in_torch):
        yield


# The value of each optimisation: the same decoding without it.
ABLATIONS: dict[str, dict[str, Any]] = {
    "all on": {},
    "overlap off": {"depth": 0},
    "graphs off": {"enforce_eager": True},
    "attention in torch": {"attention_backend": "torch"},
}
FUSIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "norms in torch": partial(layers_in_torch, RMSNorm),
    "head norms and rotation in torch": partial(layers_in_torch, Attention),
    "gates in torch": partial(layers_in_torch, MLP),
    "embedding in torch": partial(layers_in_torch, TokenEmbedding),
    "few rows times weights in torch": partial(layers_in_torch, Linear, LMHead),
    "sampling in torch": sampling_in_torch,
    "launches not overlapped": partial(mock.patch.object, overlap, "CHIPS", set[Any]()),
}


def ablations(bench: Bench) -> list[Row]:
    model, batches = "qwen3-0.6b", (2,) if bench.smoke else (1, 64)
    context, steps = (32, 4) if bench.smoke else (1024, 64)
    rows, best = [], dict.fromkeys(batches, 0.0)
    for name in [*ABLATIONS, *FUSIONS]:
        with FUSIONS.get(name, nullcontext)():
            engine = bench.engine(
                model,
                max_num_seqs=max(batches),
                max_model_len=2 * context,
                **ABLATIONS.get(name, {}),
            )
            for batch in batches:
                works = bench.works(model, batch, context - steps // 2, context)
                rate = batch / statistics.mean(engine.decode_seconds(works, steps))
                best[batch] = best[batch] or rate
                lost = f"{100 * (1 - rate / best[batch]):.0f} % lost"
                rows.append(Row(f"0.6B, batch {batch}, {name}", rate, "tok/s", note=lost))
            del engine
    return rows


ALL = (1, 8, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Section:
    """A measurement, and the seconds after which it is stopped."""

    measure: Callable[[Bench], list[Row]]
    seconds: float


CHECK: dict[str, Section] = {
    "ceilings": Section(ceilings, 40),
    "attention": Section(attention, 50),
    "decode-8b": Section(lambda bench: decode(bench, "llama-3.1-8b", ALL), 90),
    "decode-0.6b": Section(lambda bench: decode(bench, "qwen3-0.6b", (1, 8, 64, 256)), 60),
    "nano": Section(nano, 100),
    "ledger": Section(ledger, 60),
    "prefill": Section(prefill, 60),
    "idle": Section(idle, 50),
    "http": Section(http, 90),
}
ABLATE: dict[str, Section] = {
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
    parser.add_argument("--profile", type=Path, help="where section idle writes its trace")
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
