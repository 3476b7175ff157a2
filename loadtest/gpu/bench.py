"""Shared by all GPU sections: rows of the table, engines with real shapes, timing on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from engine.config import EngineConfig
from engine.kernels.triton.chips import Features
from loadtest.gpu.models import CONFIGS, SMALL, Chip, Shape, write_model
from loadtest.inprocess import Engine, Work

NANO_MODEL = "qwen3-0.6b"
# Features of inline assembly, which Triton's interpreter refuses, and their values without it.
NOT_INTERPRETED: dict[str, Any] = {"overlap": False, "prefetch_bytes": 0}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. It must be at least `goal`, or at most `goal` with `at_most`.

    `figures` are further ones of the same measurement, which only the JSON shows.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


@dataclass(frozen=True, slots=True)
class Bench:
    """The device and the size of the measurements."""

    chip: Chip
    smoke: bool  # small models on a CPU, only to check that everything runs
    folder: Path
    profile: Path | None = None  # where section idle writes its trace

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def features(self, features: Features) -> Features:
        """Return what a variant forces here: without a GPU, what Triton's interpreter can run."""
        if not self.smoke:
            return features
        fields = {
            name: value for name, value in NOT_INTERPRETED.items() if name in features._fields
        }
        return features._replace(**fields)

    def config(self, model: str) -> dict[str, Any]:
        return CONFIGS[model] | (SMALL if self.smoke else {})

    def shape(self, model: str) -> Shape:
        return Shape.of(self.config(model))

    def model(self, name: str, **overrides: Any) -> Path:
        """Write the model's folder, for `--load-format dummy`, and return its path."""
        return write_model(self.config(name) | overrides, self.folder / name)

    @contextmanager
    def triton(self) -> Iterator[None]:
        """Let engines that are loaded in this context launch Triton's kernels, also on a CPU.

        Without it, only the attention of a dry run is interpreted, and layers compute with torch.
        """
        with mock.patch("engine.memory.model_plan.select_kernels", return_value="triton"):
            yield

    def engine(
        self,
        model: str,
        *,
        depth: int | None = None,
        overrides: dict[str, Any] | None = None,
        **config: Any,
    ) -> Engine:
        folder = self.model(model, **(overrides or {}))
        settings: dict[str, Any] = {
            "device": self.device,
            "threads": 1 if self.smoke else None,
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "speculation": "off",  # a step with drafts is no decode step
            "dtype": "bfloat16",
        }
        return Engine(EngineConfig(model=str(folder), **(settings | config)), depth)

    @property
    def nano_length(self) -> tuple[int, int]:
        return (4, 12) if self.smoke else (100, 1024)

    def nano_limits(self, works: Sequence[Work]) -> dict[str, Any]:
        """Return the settings under which all of `nano_works` run at once."""
        high = self.nano_length[1]
        return {
            "max_num_seqs": len(works),
            "max_model_len": 2 * high,
            "max_num_batched_tokens": 16 * high,
        }

    def nano_works(self) -> list[Work]:
        """Return the workload of nano-vllm's benchmark.

        It has 256 sequences with 100 to 1,024 tokens each of input and output.
        """
        random, (low, high) = Random(0), self.nano_length
        last, prompts = min(self.config(NANO_MODEL)["vocab_size"] - 1, 10000), []
        for _ in range(8 if self.smoke else 256):
            length = random.randint(low, high)
            prompts.append([random.randint(0, last) for _ in range(length)])
        outputs = [random.randint(low, high) for _ in prompts]
        return [Work(p, o, temperature=0.6) for p, o in zip(prompts, outputs, strict=True)]

    def works(self, model: str, count: int, prompt: int, answer: int) -> list[Work]:
        random, size = Random(0), self.config(model)["vocab_size"]
        return [
            Work([random.randrange(3, size) for _ in range(prompt)], answer) for _ in range(count)
        ]


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays `run` as a graph, so that launches take no time."""
    if not torch.cuda.is_available():
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def device_seconds(run: Callable[[], object]) -> float:
    """Return the median seconds of `run` on the device, after a warm-up.

    Without a GPU it is a dry run, which runs once.
    """
    times: list[float] = []
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        run()
    for _ in range(10 if has_gpu else 1):
        if has_gpu:
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
