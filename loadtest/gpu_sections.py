"""The measurements of `loadtest/gpu.py`, each in a process of its own: one leaves no memory behind.

`python -m loadtest.gpu_sections NAME` prints its rows as JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch._C._autograd import DeviceType

from engine.config import EngineConfig
from loadtest.gpu_models import CONFIGS, SMALL, Chip, Shape, write_model
from loadtest.inprocess import Engine, Work


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `goal` is what it must reach; `at_most` turns that around."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how large to measure."""

    chip: Chip
    smoke: bool  # on a CPU, with small models: does it run, not how fast
    folder: Path

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def shape(self, model: str) -> Shape:
        return Shape.of(CONFIGS[model] | (SMALL if self.smoke else {}))

    def vocabulary(self, model: str) -> int:
        return int((CONFIGS[model] | (SMALL if self.smoke else {}))["vocab_size"])

    def engine(self, model: str, *, depth: int | None = None, **config: Any) -> Engine:
        folder = write_model(model, self.folder / model, small=self.smoke)
        settings: dict[str, Any] = {
            "device": self.device,
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "dtype": "bfloat16",
        }
        return Engine(EngineConfig(model=str(folder), **(settings | config)), depth)

    def works(self, model: str, count: int, prompt: int, answer: int) -> list[Work]:
        random, size = Random(0), self.vocabulary(model)
        return [
            Work([random.randrange(3, size) for _ in range(prompt)], answer) for _ in range(count)
        ]


def device_seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds of `run` on the device, after a warm-up."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def ceilings(bench: Bench) -> list[Row]:
    """What memory and matrix units do here, on random data: the denominators of all shares."""
    size, edge = (2**18, 256) if bench.smoke else (2**31, 8192)
    data = torch.randn(size, device=bench.device)
    read = data.nbytes / device_seconds(data.sum)
    copy = 2 * data.nbytes / device_seconds(data.clone)
    del data
    a, b = (torch.randn(edge, edge, device=bench.device).bfloat16() for _ in range(2))
    matmul = 2 * edge**3 / device_seconds(lambda: a @ b)
    return [
        Row("memory read", max(read, copy) / 1e12, "TB/s", note=f"sum {read:.3g}, copy {copy:.3g}"),
        Row("bf16 matmul", matmul / 1e12, "TFLOP/s", note=f"{edge}x{edge}x{edge}"),
    ]


def nano(bench: Bench) -> list[Row]:
    """256 sequences of 100 to 1,024 tokens in and out, as nano-vllm's benchmark draws them."""
    model, low, high, count = "qwen3-0.6b", 100, 1024, 256
    if bench.smoke:
        low, high, count = 4, 12, 8
    random = Random(0)
    size = min(bench.vocabulary(model) - 1, 10000)
    prompts = []
    for _ in range(count):
        length = random.randint(low, high)
        prompts.append([random.randint(0, size) for _ in range(length)])
    outputs = [random.randint(low, high) for _ in range(count)]
    works = [Work(p, o, temperature=0.6) for p, o in zip(prompts, outputs, strict=True)]
    engine = bench.engine(
        model, max_num_seqs=count, max_model_len=2 * high, max_num_batched_tokens=16 * high
    )
    engine.generate(works[: count // 8])
    seconds = statistics.median(engine.generate(works) for _ in range(1 if bench.smoke else 3))
    rate = sum(outputs) / seconds
    floor = bench.shape(model).offline_seconds([len(p) for p in prompts], outputs, bench.chip)
    share = 100 * floor / seconds
    rows = [Row("0.6B, nano workload", rate, "tok/s", 25_000)]
    return [*rows, Row("0.6B, nano workload, share of the floor", share, "%", 70)]


BATCH_1 = {"llama-3.1-8b": 240.0, "qwen3-0.6b": 1250.0, "gemma-2-2b": 535.0, "gemma-2-9b": None}


def decode(bench: Bench, model: str, batches: tuple[int, ...]) -> list[Row]:
    """Steady decoding at context 1,024."""
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
        goal = BATCH_1[model] if batch == 1 else None
        rows.append(Row(f"{model}, decode, batch {batch}", rate, "tok/s", goal))
        share = 100 * least * rate / batch
        goal = 80 if model == "llama-3.1-8b" else None
        rows.append(Row(f"{model}, decode, batch {batch}, share of the bound", share, "%", goal))
        if batch == 256:
            tail = sorted(gaps)[int(len(gaps) * 0.99)] / statistics.median(gaps)
            rows.append(Row(f"{model}, 256 streams, p99 over median gap", tail, "x", 1.5, True))
    return rows


def prefill(bench: Bench) -> list[Row]:
    """One prompt at a time, until its first token is on the host."""
    model, lengths = "llama-3.1-8b", (32,) if bench.smoke else (1024, 2048, 4096, 8192)
    engine = bench.engine(
        model, max_num_seqs=4, max_model_len=2 * lengths[-1], max_num_batched_tokens=lengths[-1]
    )
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


def idle(bench: Bench) -> list[Row]:
    """The share of time in which no kernel runs, over 30 decode steps of 256 sequences."""
    model, batch = "qwen3-0.6b", 4 if bench.smoke else 256
    engine = bench.engine(model, max_num_seqs=batch, max_model_len=512)
    works = bench.works(model, batch, 64, 200)
    if bench.smoke:
        engine.decode_seconds(works, 4)
        return []
    engine.decode_seconds(works, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.decode_seconds(works, 30)
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profile.events() or []
        if e.device_type == DeviceType.CUDA
    )
    spans = spans[len(spans) // 2 :]  # prompts are over, what is left are decode steps
    busy, reach = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    share = 100 * (1 - busy / (reach - spans[0][0]))
    return [Row("0.6B, 256 streams, GPU idle", share, "%", 2, True)]


# What each is worth: the same decoding without it.
ABLATIONS: dict[str, dict[str, Any]] = {"all on": {}, "overlap off": {"depth": 0}}


def ablations(bench: Bench) -> list[Row]:
    model, batches = "qwen3-0.6b", (2,) if bench.smoke else (1, 64)
    context, steps = (32, 4) if bench.smoke else (1024, 64)
    rows, best = [], dict.fromkeys(batches, 0.0)
    for name, settings in ABLATIONS.items():
        engine = bench.engine(
            model, max_num_seqs=max(batches), max_model_len=2 * context, **settings
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
SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "ceilings": ceilings,
    "nano": nano,
    "decode-0.6b": lambda bench: decode(bench, "qwen3-0.6b", (1, 256)),
    "decode-8b": lambda bench: decode(bench, "llama-3.1-8b", ALL),
    "decode-gemma-2b": lambda bench: decode(bench, "gemma-2-2b", (1, 64)),
    "decode-gemma-9b": lambda bench: decode(bench, "gemma-2-9b", (1, 64)),
    "prefill": prefill,
    "idle": idle,
    "ablations": ablations,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SECTIONS)
    parser.add_argument("--read", type=float, default=4.3e12, help="bytes/s, as measured")
    parser.add_argument("--matmul", type=float, default=790e12, help="FLOP/s, as measured")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Chip(options.read, options.matmul), options.smoke, Path(folder))
        rows = SECTIONS[options.name](bench)
    print(json.dumps([asdict(row) for row in rows]), file=sys.stdout)


if __name__ == "__main__":
    main()
