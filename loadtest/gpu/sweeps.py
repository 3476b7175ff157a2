"""Measure the tiles of two kernels against each other: the linear of few rows, decode attention.

Each sweep ends with the tiles in the order of their times. A weight has one tile for all row
counts, the one with the least geometric mean of their times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from unittest import mock

import torch
import torch.nn.functional as F

from engine.kernels.triton import decode_attention
from engine.kernels.triton.chips import LinearTile
from engine.kernels.triton.decode_attention import DecodeTile
from engine.kernels.triton.linear import MAX_ROWS, TILE, few_rows_linear
from loadtest.gpu.bench import Bench, Row, captured, device_seconds
from loadtest.gpu.device import LAYERS, paged_attention

LINEAR_TILES = [
    TILE,
    LinearTile(16, 256, 4, 4),
    *(LinearTile(16, 256, stages, 2) for stages in (3, 6)),
    LinearTile(16, 128, 6, 2),
    LinearTile(16, 512, 4, 2),
    *(LinearTile(32, 256, stages, 2) for stages in (3, 4)),
    LinearTile(32, 128, 6, 2),
]
# (inputs, outputs) of the layers of a model, and of its head.
LAYER_SHAPES = {
    "llama-3.1-8b": [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)],
    "qwen3-0.6b": [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)],
}
HEADS = [(4096, 128256), (1024, 151936)]
WEIGHTS = [*(shape for shapes in LAYER_SHAPES.values() for shape in shapes), *HEADS]
DECODE_TILES = [
    *(DecodeTile(64, 4, stages) for stages in (5, 3, 7)),
    *(DecodeTile(64, warps, 5) for warps in (2, 8)),
    *(DecodeTile(32, warps, 7) for warps in (1, 2, 4)),
    DecodeTile(32, 4, 5),
    DecodeTile(128, 4, 4),
    DecodeTile(128, 8, 5),
]
Tile = TypeVar("Tile", LinearTile, DecodeTile)
Weight = TypeVar("Weight")
CACHE_BYTES = 256 << 20  # several times an L2 cache
# A replay starts in 4 to 8 us, and its first kernel overlaps with none: one weight would show that.
LEAST_WEIGHTS = 8
ROWS = (1, 16, 32, 64)
TILE_OF = "tile of a weight"


def num_weights(size: int) -> int:
    """Return how many weights of `size` bytes one replay multiplies by: no cache holds them."""
    return max(LEAST_WEIGHTS, CACHE_BYTES // size)


def every_weight(
    linear: Callable[[torch.Tensor, Weight], object], x: torch.Tensor, weights: Sequence[Weight]
) -> Callable[[], None]:
    """Return a function that multiplies `x` by each weight in turn."""

    def run() -> None:
        for weight in weights:
            linear(x, weight)

    return run


def linear_seconds(
    linear: Callable[[torch.Tensor, Weight], object], x: torch.Tensor, weights: Sequence[Weight]
) -> float:
    """Return the seconds of `linear` with one weight; many weights in turn are in no cache."""
    return device_seconds(captured(every_weight(linear, x, weights))) / len(weights)


def linear_with(tile: LinearTile, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return few_rows_linear(x, weight, None, x.dtype, tile)


@torch.inference_mode()
def sweep_linear(bench: Bench) -> list[Row]:
    """Measure every tile at several row counts of each weight, against cuBLAS."""
    shapes = [(64, 48), (48, 64)] if bench.smoke else WEIGHTS
    tiles = LINEAR_TILES[:2] if bench.smoke else LINEAR_TILES
    rows: list[Row] = []
    totals = dict.fromkeys(tiles, 0.0)
    measured = sum(count <= MAX_ROWS for count in ROWS)
    for inputs, outputs in shapes:
        logs = dict.fromkeys(tiles, 0.0)
        size = 2 * inputs * outputs
        shape = LEAST_WEIGHTS if bench.smoke else num_weights(size), outputs, inputs
        store = torch.randn(shape, device=bench.device, dtype=torch.bfloat16).unbind()
        for count in ROWS:
            x = torch.randn(count, inputs, device=bench.device, dtype=torch.bfloat16)
            cublas = linear_seconds(F.linear, x, store)
            seconds = dict.fromkeys(tiles, 0.0)
            if count <= MAX_ROWS:
                for tile in tiles:
                    seconds[tile] = linear_seconds(partial(linear_with, tile), x, store)
                    logs[tile] += math.log(seconds[tile])
            what = f"linear, {count} rows, {inputs} to {outputs}"
            rows.append(sweep_row(what, size / bench.chip.read, cublas, seconds))
        best = min(tiles, key=logs.__getitem__)
        ratio = math.exp((logs[best] - logs[tiles[0]]) / measured)
        what = f"{TILE_OF} ({outputs}, {inputs})"
        rows.append(Row(what, ratio, "x", note=f"{best} against {tiles[0]}"))
        for tile in tiles:
            totals[tile] += logs[tile]
    return [*rows, *ranking("TILE =", tiles, totals, measured * len(shapes))]


def sweep_row(what: str, bound: float, cublas: float, seconds: dict[LinearTile, float]) -> Row:
    """Return the row of one weight and row count, in shares of the rate of reading.

    `bound` and the other times are seconds; the first of the tiles is today's. A time of 0 means
    that our kernel does not take that number of rows.
    """
    first, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    figures = {"cublas_us": 1e6 * cublas, "tile_us": 1e6 * seconds[first]}
    figures["best_us"] = 1e6 * seconds[best]
    share = 100 * bound
    if not seconds[best]:
        note = f"cuBLAS; our kernel takes up to {MAX_ROWS} rows"
        return Row(what, share / cublas, "% of read", note=note, figures=figures)
    note = f"cuBLAS {share / cublas:.0f} %, best {tuple(best)} {share / seconds[best]:.0f} %"
    return Row(what, share / seconds[first], "% of read", note=note, figures=figures)


def sweep_attention(bench: Bench) -> list[Row]:
    """Measure every tile of decode attention, of an 8B layer."""
    cases = [(2, 48)] if bench.smoke else [(8, 1024), (64, 1024), (256, 1024), (1, 8192)]
    tiles = DECODE_TILES[:2] if bench.smoke else DECODE_TILES
    rows: list[Row] = []
    logs = dict.fromkeys(tiles, 0.0)
    for batch, context in cases:
        measured: dict[DecodeTile, float] = {}
        run, read = paged_attention(bench, batch, context)
        for tile in tiles:
            with mock.patch.object(decode_attention, "decode_tile", return_value=tile):
                measured[tile] = device_seconds(captured(run)) / LAYERS
            logs[tile] += math.log(measured[tile])
        best = min(tiles, key=measured.__getitem__)
        share = 100 * read / bench.chip.read
        what = f"decode attention, {batch} x {context} keys"
        note = f"best {tuple(best)} {share / measured[best]:.0f} %"
        rows.append(Row(what, share / measured[tiles[0]], "% of read", note=note))
    return [*rows, *ranking("decode_tile:", tiles, logs, len(rows))]


def ranking(line: str, tiles: Sequence[Tile], logs: dict[Tile, float], count: int) -> list[Row]:
    """Return the geometric mean of each tile's time, as a multiple of the first one's."""
    order = sorted(tiles, key=logs.__getitem__)
    rows = []
    for tile in order:
        ratio = math.exp((logs[tile] - logs[tiles[0]]) / count)
        note = "the line to write" if tile == order[0] else ""
        rows.append(Row(f"{line} {tile}", ratio, "x", note=note))
    return rows
