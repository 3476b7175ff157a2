"""Measure the tiles of two kernels against each other: the linear of few rows, decode attention.

Each sweep ends with the line to write into the kernel's module.
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
from engine.kernels.triton.linear import TILE, few_rows_linear
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
# (inputs, outputs) of Llama-3.1-8B and of Qwen3-0.6B; the last of each is the head.
WEIGHTS = [
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    *((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)),
]
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


def linear_seconds(
    linear: Callable[[torch.Tensor, Weight], object], x: torch.Tensor, weights: Sequence[Weight]
) -> float:
    """Return the seconds of `linear` with one weight; many weights in turn are in no cache."""

    def run() -> None:
        for weight in weights:
            linear(x, weight)

    return device_seconds(captured(run)) / len(weights)


def linear_with(tile: LinearTile, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return few_rows_linear(x, weight, None, x.dtype, tile)


@torch.inference_mode()
def sweep_linear(bench: Bench) -> list[Row]:
    """Measure every tile at 1, 8 and 16 rows of each weight, against cuBLAS."""
    shapes = [(64, 48), (48, 64)] if bench.smoke else WEIGHTS
    tiles = LINEAR_TILES[:2] if bench.smoke else LINEAR_TILES
    rows: list[Row] = []
    logs = dict.fromkeys(tiles, 0.0)
    for inputs, outputs in shapes:
        size = inputs * outputs
        count = 2 if bench.smoke else max(1, CACHE_BYTES // (2 * size))
        shape = count, outputs, inputs
        store = torch.randn(shape, device=bench.device, dtype=torch.bfloat16).unbind()
        for num_rows in (1, 8, 16):
            x = torch.randn(num_rows, inputs, device=bench.device, dtype=torch.bfloat16)
            seconds = {tile: linear_seconds(partial(linear_with, tile), x, store) for tile in tiles}
            for tile in tiles:
                logs[tile] += math.log(seconds[tile])
            cublas = linear_seconds(F.linear, x, store)
            best = min(tiles, key=seconds.__getitem__)
            share = 100 * 2 * size / bench.chip.read
            note = (
                f"cuBLAS {share / cublas:.0f} %, best {tuple(best)} {share / seconds[best]:.0f} %"
            )
            what = f"linear, {num_rows} rows, {inputs} to {outputs}"
            rows.append(Row(what, share / seconds[tiles[0]], "% of read", note=note))
    return [*rows, *ranking("TILE =", tiles, logs, len(rows))]


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
            with mock.patch.object(decode_attention, "decode_tile", lambda *_, tile=tile: tile):
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
