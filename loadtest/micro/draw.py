"""CPU time of the draw of tokens on a CPU: our kernel next to torch.

The logits are random, with SmolLM2's vocabulary. Each figure is the time of one draw of all rows.
CPU time of one thread hardly depends on other programs.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch

from engine.device.openmp import parallel
from engine.ops.kernels import Kernels
from engine.sampling.sampler import DrawParams, draw
from loadtest.errors import BenchError
from loadtest.micro.case import Case, Table, in_turn

TORCH, NUMBA = "torch", "numba"
ROWS = (1, 8, 32)
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 40": {"top_k": 40},
    "min-p 0.05": {"min_p": 0.05},
}


def params_of(rows: int, setting: dict[str, float]) -> DrawParams:
    """Return the same parameters for each row, with seeds of their own."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
    return DrawParams(
        temperature=torch.full((rows,), given["temperature"]),
        top_k=torch.full((rows,), int(given["top_k"]), dtype=torch.int32),
        top_p=torch.full((rows,), given["top_p"]),
        min_p=torch.full((rows,), given["min_p"]),
        seeds=torch.arange(rows),
        positions=torch.full((rows,), 9),
    )


def milliseconds(kernels: str, logits: torch.Tensor, params: DrawParams, turn: int) -> float:
    began = time.process_time()
    draw(logits, params, cast(Kernels, kernels))
    return 1000 * (time.process_time() - began)


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    if parallel() is None:
        raise BenchError("this torch has no OpenMP threads")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for rows in ROWS:
        logits = torch.randn(rows, options.vocabulary, generator=generator) * options.spread
        for name, setting in SETTINGS.items():
            params = params_of(rows, setting)
            runs = {way: partial(milliseconds, way, logits, params) for way in (TORCH, NUMBA)}
            for run in runs.values():
                run(0)
            samples = in_turn(runs, options.rounds)
            yield Table(samples, f"ms of CPU, {rows} rows, {name}", (TORCH,))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each table (default 15)")
    parser.add_argument("--vocabulary", type=int, default=49152, help="logits of a row")
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of logits")


CASE = Case(__doc__ or "", add_options, measure)
