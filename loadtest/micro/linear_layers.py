"""Linear layers in bf16 on a CPU: our kernels with vectors and in tiles (AMX), next to oneDNN.

The weights are random, and have the sizes of SmolLM2-135M's layers. Each figure is the time of one
pass through all layers, in all threads. Without AMX there are no tiles.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from engine.kernels.numba.linear import (
    IN_TILES,
    SPLITS,
    WIDTHS,
    PackedMultiply,
    has_kernel,
    pack_panels,
    tiles_problem,
)
from engine.layers.weights.onednn import PackedWeight
from loadtest.errors import BenchError
from loadtest.micro.case import Case, Table, in_turn

SIZES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # [out, in] of a layer's weights
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 1024)
ONEDNN, VECTORS, TILES = "oneDNN", "vectors", "tiles"

Multiply = Callable[[torch.Tensor], torch.Tensor]


def multiplies(layers: int) -> Mapping[str, Sequence[Multiply]]:
    """Return the products of all weights, by the way that they are computed."""
    in_tiles = tiles_problem() is None
    names = (ONEDNN, VECTORS, TILES) if in_tiles else (ONEDNN, VECTORS)
    found: dict[str, list[Multiply]] = {name: [] for name in names}
    for _ in range(layers):
        for outputs, inputs in SIZES:
            weight = torch.randn(outputs, inputs).bfloat16()
            panels = pack_panels(weight, max(WIDTHS))
            found[ONEDNN].append(PackedWeight(weight))
            found[VECTORS].append(PackedMultiply(panels, max(SPLITS)))
            if in_tiles:
                found[TILES].append(PackedMultiply(panels, IN_TILES))
    return found


def milliseconds(
    layers: Sequence[Multiply], inputs: Mapping[int, torch.Tensor], turn: int
) -> float:
    """Return the time of one pass through the layers. `inputs` are [rows, in], by their size."""
    began = time.perf_counter()
    for index, layer in enumerate(layers):
        layer(inputs[SIZES[index % len(SIZES)][1]])
    return 1000 * (time.perf_counter() - began)


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    if not has_kernel(torch.bfloat16):
        raise BenchError("this CPU does not multiply bf16 (AVX512_BF16)")
    problem = tiles_problem()
    if problem is not None:
        print(f"no tiles: {problem}", flush=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    ways = multiplies(options.layers)
    products = options.layers * sum(outputs * inputs for outputs, inputs in SIZES)
    for rows in ROWS:
        given = {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs in SIZES}
        runs = {way: partial(milliseconds, layers, given) for way, layers in ways.items()}
        for run in runs.values():
            run(0)
        samples = in_turn(runs, options.rounds)
        billions = 2 * rows * products / 1e9
        notes = {
            way: f"{billions / min(times) * 1000:.0f} GFLOP/s at best"
            for way, times in samples.items()
        }
        yield Table(samples, f"ms, {rows} rows", (ONEDNN,), notes=notes)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each table (default 7)")
    parser.add_argument("--layers", type=int, default=30, help="of the model (default 30)")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")


CASE = Case(__doc__ or "", add_options, measure)
