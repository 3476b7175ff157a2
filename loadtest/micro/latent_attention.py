"""Decode steps of latent attention on a CPU: Numba's kernels next to torch's.

The layers have the sizes of DeepSeek-V2-Lite: one dense layer, and others with experts. Weights are
random, and the cache holds zeros, so that no prompt is computed. Both engines run in this process
and take turns; Numba's also without the recorded steps (docs/cpu.md).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig
from engine.protocol.generate import SamplingParams
from engine.runner.load import load_engine
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import NewBlocks, NewRow, ScheduledSlice, Step
from loadtest.micro.case import Case, Table, in_turn

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 32000,  # the head is no part of the layers
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
NUMBA, UNRECORDED, TORCH = "numba", "numba, not recorded", "torch"
CONTEXTS, STREAMS = (512, 2048, 8000), (1, 8)
WARM_UP = 2  # steps


class Decodes:
    """Sequences of equal length in one engine. Their keys are what the cache holds: zeros."""

    def __init__(self, folder: Path, backend: Literal["torch", "numba"], threads: int) -> None:
        config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            attention_backend=backend,
            threads=threads or None,
            max_num_seqs=max(STREAMS),
            kv_cache_memory_bytes=1 << 30,
            speculation="off",
        )
        self._block_size = config.block_size
        self._runner: ModelRunner = load_engine(config).runner

    @contextlib.contextmanager
    def without_programs(self) -> Iterator[None]:
        """Compute every step in Python."""
        programs, self._runner.programs = self._runner.programs, None
        yield
        self._runner.programs = programs

    def milliseconds(self, context: int, streams: int, steps: int) -> float:
        """Return the mean time of a decode step behind `context` tokens."""
        params = SamplingParams(WARM_UP + steps, temperature=0.0)
        rows = tuple(
            NewRow(row, (3,) * context + (5 + 1009 * row,), context + 1, params)
            for row in range(streams)
        )
        count = -(-(context + 1 + WARM_UP + steps) // self._block_size)
        blocks = tuple(
            NewBlocks(row, 0, 0, tuple(range(1 + row * count, 1 + (row + 1) * count)))
            for row in range(streams)
        )
        began = 0.0
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                began = time.perf_counter()
            slices = tuple(
                ScheduledSlice(
                    id=row, epoch=0, row=row, start=context + number, count=1, samples=True
                )
                for row in range(streams)
            )
            first = number == 0
            step = Step(slices, rows if first else (), blocks if first else ())
            self._runner.launch(step).wait()
        return 1000 * (time.perf_counter() - began) / steps


class Ways:
    """The ways to compute decodes, and the milliseconds of a step of each."""

    def __init__(self, folder: Path, options: Namespace) -> None:
        self._torch = Decodes(folder, "torch", options.threads)
        self._numba = Decodes(folder, "numba", options.threads)
        self._steps = options.steps

    def of(self, context: int, streams: int) -> dict[str, Callable[[int], float]]:
        sizes = context, streams, self._steps

        def unrecorded(turn: int) -> float:
            with self._numba.without_programs():
                return self._numba.milliseconds(*sizes)

        return {
            TORCH: lambda turn: self._torch.milliseconds(*sizes),
            UNRECORDED: unrecorded,
            NUMBA: lambda turn: self._numba.milliseconds(*sizes),
        }


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = CONFIG | {"num_hidden_layers": options.layers}
    (folder / "config.json").write_text(json.dumps(config))
    ways = Ways(folder, options)
    for streams in STREAMS:
        for context in CONTEXTS:
            samples = in_turn(ways.of(context, streams), options.rounds)
            unit = f"ms a step, {options.layers} layers, {streams} streams behind {context} tokens"
            yield Table(samples, unit, (TORCH, UNRECORDED))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each table (default 7)")
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a figure (default 8)")
    parser.add_argument("--layers", type=int, default=3, help="of the model (default 3)")
    parser.add_argument("--threads", type=int, default=0, help="of the engines; 0: all cores")


CASE = Case(__doc__ or "", add_options, measure)
