"""Linear layers for up to 64 rows, with the norm before them and the activation or sum after them.

Norm: the inputs are multiplied by the norm's weight before the product, and the outputs by the
reciprocal root mean square of their row behind it. The kernel that wrote the inputs left sums of
squares of parts of each row. Behind the product come a bias, then the activation of gate times up,
or the residual addition with the sums of squares for the next norm.

Each program computes a few outputs for all rows. A row's sums have one order with every tile: its
inputs ascend, tensor cores take 16 of them at a time, and parts are added in pairs (`pairs.py`). So
the bits of a row do not depend on the number of rows. Tiles have two warps, because four or more
would use other instructions for 64 outputs than for fewer.

Where outputs are few, several programs share the inputs. The last one to finish adds their sums, in
the order of the inputs, and sets the counter of finished programs to 0 again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from engine.kernels.triton.chips import LinearTile, chip_of, features_of
from engine.kernels.triton.folded_kernel import folded_linear_kernel
from engine.kernels.triton.overlap import launch_options

MAX_ROWS = 64
# By rows of the tile. Triton multiplies with 8 rows from 3.5 on.
TILES = {
    8: LinearTile(outputs=16, inputs=256, stages=4, warps=2),
    16: LinearTile(outputs=16, inputs=128, stages=6, warps=2),
    32: LinearTile(outputs=32, inputs=64, stages=6, warps=2),
    64: LinearTile(outputs=64, inputs=32, stages=6, warps=2),
}
FEWEST_ROWS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5) else 16
MAX_PARTS = 256  # sums of squares of a row
NORMED_TILE = LinearTile(outputs=16, inputs=128, stages=6, warps=2)  # of 8 rows, behind a norm
# Tiles of the weight in registers before the wait: MAX_EARLY if these are all, else EARLY_TILES.
# Behind a norm fewer registers are free; the number depends on the rows of the tile.
MAX_EARLY, EARLY_TILES = 4, 2
NORMED_EARLY = {8: 4, 16: 2, 32: 1, 64: 1}
SHARE_MULTIPLE = 256  # the inputs of a program, if several share them, are a multiple
NUM_SMS = 132  # of a chip that is not known


class Norm(NamedTuple):
    """The RMS norm of a layer's inputs [T, in]. A stored weight is weight - 1 with `offset`."""

    weight: torch.Tensor  # [in]
    eps: float
    offset: bool
    squares: torch.Tensor  # [T, parts] fp32: the sums of squares of parts of each row


class Residual(NamedTuple):
    """The tensor that a layer's outputs are added to, and counters of its programs, all 0."""

    x: torch.Tensor  # [T, out]
    counters: torch.Tensor  # [programs] int32


class FoldedResult(NamedTuple):
    out: torch.Tensor  # [T, width]
    squares: torch.Tensor | None  # [T, parts] fp32 of parts of each row, if added to a residual


class Shares(NamedTuple):
    """How many programs share the inputs of an output, and the inputs of each."""

    programs: int
    inputs: int


class Work(NamedTuple):
    """The part of a product that each program computes."""

    rows: int  # of the tile
    tile: LinearTile
    shares: Shares
    early: int  # tiles of the weight that are loaded before the wait


def folded_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    norm: Norm | None = None,
    kind: str | None = None,
    residual: Residual | None = None,
    out: torch.Tensor | None = None,
) -> FoldedResult:
    """Return norm(x) W^T + b in `dtype`, for x [T, in] with up to MAX_ROWS rows and W [out, in].

    The result is in `out` if it is given: a dense tensor of its shape and dtype.

    With `kind`, the outputs are gates and up one after the other, and the result [T, out / 2] is
    the activated gate times up. With a residual, it is the sum of both, and its squares are summed.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    assert rows <= MAX_ROWS
    assert weight.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    work = work_of(weight, rows, x.device, norm, residual)
    programs = triton.cdiv(outputs, work.tile.outputs)
    width = outputs if kind is None else outputs // 2
    if out is None:
        out = torch.empty(rows, width, dtype=dtype, device=x.device)
    assert out.is_contiguous()
    squares = shares = counters = None
    if residual is not None:
        squares = torch.empty(rows, programs, dtype=torch.float32, device=x.device)
        shares, counters = _room_of_shares(work, programs, residual)
    parts = 1 if norm is None else norm.squares.shape[1]
    if rows:
        folded_linear_kernel[programs, work.shares.programs](
            x,
            None if norm is None else norm.weight,
            None if norm is None else norm.squares,
            weight,
            bias,
            None if residual is None else residual.x,
            out,
            squares,
            shares,
            counters,
            x.stride(0),
            rows,
            parts,
            inputs,
            outputs,
            0.0 if norm is None else norm.eps,
            kind,
            int(norm is not None and norm.offset),
            triton.next_power_of_2(parts),
            *_constants(work),
            num_warps=work.tile.warps,
            **launch_options(x.device),
        )
    return FoldedResult(out, squares)


def _room_of_shares(
    work: Work, programs: int, residual: Residual
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return room for the sums of programs that share an output, and the counters of these."""
    if work.shares.programs == 1:
        return None, None
    assert programs <= len(residual.counters)
    size = work.shares.programs * programs * work.tile.outputs * work.rows
    room = torch.empty(size, dtype=torch.float32, device=residual.counters.device)
    return room, residual.counters


def _constants(work: Work) -> tuple[int, ...]:
    """Return the kernel's arguments from SHARES to STAGES."""
    tile, shares = work.tile, work.shares
    return (*shares, work.early, work.rows, tile.outputs, tile.inputs, tile.stages)


def work_of(
    weight: torch.Tensor,
    rows: int,
    device: torch.device,
    norm: Norm | None,
    residual: Residual | None,
) -> Work:
    """Return how programs divide a product of `rows` rows. Only sums with a residual are shared."""
    outputs, inputs = weight.shape
    features = features_of(device)
    rows = max(FEWEST_ROWS, triton.next_power_of_2(rows))
    tile = NORMED_TILE if norm is not None and rows == 8 else TILES[rows]
    if rows <= 16:
        of_shapes = {(each.outputs, each.inputs): each.tile for each in features.tiles}
        tile = of_shapes.get((outputs, inputs), tile)
    shares = Shares(1, inputs)
    if residual is not None:
        fewest = triton.next_power_of_2(triton.cdiv(outputs, MAX_PARTS))
        tile = tile._replace(outputs=max(tile.outputs, fewest))
        if features.split_inputs:
            shares = shares_of(outputs, inputs, device)
    block = min(tile.inputs, max(16, triton.next_power_of_2(shares.inputs)))
    early = 0
    if features.early_weights:
        early = early_tiles(shares.inputs, block, rows, has_norm=norm is not None)
    return Work(rows, tile._replace(inputs=block), shares, early)


def early_tiles(inputs: int, tile_inputs: int, rows: int, *, has_norm: bool) -> int:
    """Return how many tiles of the weight a program loads before it waits."""
    tiles = triton.cdiv(inputs, tile_inputs)
    if has_norm:
        return min(tiles, NORMED_EARLY[rows])
    return tiles if tiles <= MAX_EARLY else EARLY_TILES


def shares_of(outputs: int, inputs: int, device: torch.device) -> Shares:
    """Return how programs share the inputs: so that each multiprocessor has two, if possible.

    It does not depend on the rows, so that a row's sums are the same at every number of rows.
    """
    chip = chip_of(device)
    num_sms = NUM_SMS if chip is None else chip.num_sms
    programs = triton.cdiv(outputs, TILES[FEWEST_ROWS].outputs)
    count = 1 if programs >= 2 * num_sms else 2 if programs >= num_sms else 4
    share = triton.cdiv(triton.cdiv(inputs, count), SHARE_MULTIPLE) * SHARE_MULTIPLE
    count = triton.cdiv(inputs, share)
    return Shares(count, share if count > 1 else inputs)
