"""Linear layers of experts: each row is multiplied with its expert's weight.

The rows are sorted by expert. How many an expert has is known on the device only, so the grid has
programs for the most tiles of rows that there can be. Each one finds its expert, or has no work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.overlap import launch_options, wait_for_inputs


class ExpertsTile(NamedTuple):
    """The tile of a program: rows, outputs, inputs read at a time, tiles in flight, and warps."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


# Reasoned, not measured. With few rows of an expert, the time is that of reading its weight.
FEW = ExpertsTile(rows=16, outputs=32, inputs=128, stages=4, warps=2)
MANY = ExpertsTile(rows=64, outputs=64, inputs=64, stages=3, warps=4)
# In fp32 no tensor core multiplies, and a thread holds its part of a tile in registers.
FP32 = ExpertsTile(rows=16, outputs=16, inputs=32, stages=2, warps=4)
MANY_ROWS = 16  # from this mean number of rows of an expert on


@triton.jit(do_not_specialize=["experts"])
def _experts_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # [experts, outputs], or None
    starts_ptr,
    out_ptr,
    x_stride,
    experts,
    inputs,
    outputs,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    tile = tl.program_id(1)
    ids = tl.arange(0, EXPERTS)
    starts = tl.load(starts_ptr + ids, ids < experts, 0)
    ends = tl.load(starts_ptr + ids + 1, ids < experts, 0)
    tiles = tl.cdiv(ends - starts, BLOCK_ROWS)
    last_tiles = tl.cumsum(tiles, 0)  # the tile after an expert's last one
    expert = tl.sum((last_tiles <= tile).to(tl.int64), 0)
    if expert >= experts:
        return
    own = ids == expert
    first_tile = tl.sum(tl.where(own, last_tiles - tiles, 0), 0)
    end = tl.sum(tl.where(own, ends, 0), 0)
    begin = tl.sum(tl.where(own, starts, 0), 0) + (tile - first_tile) * BLOCK_ROWS
    row = begin + tl.arange(0, BLOCK_ROWS)
    at = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    weight_rows = weight_ptr + (expert * outputs + at) * inputs
    x_rows = x_ptr + row * x_stride
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, inputs, BLOCK_IN, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_IN)
        inside = column < inputs
        within = inside[None, :] & (at < outputs)[:, None]
        w = tl.load(weight_rows[:, None] + column[None, :], within, 0.0)
        x = tl.load(x_rows[None, :] + column[:, None], inside[:, None] & (row < end)[None, :], 0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    if bias_ptr is not None:
        own_bias = tl.load(bias_ptr + expert * outputs + at, at < outputs, 0.0)
        total += own_bias.to(tl.float32)[:, None]
    place = row[None, :] * outputs + at[:, None]
    inside = (row < end)[None, :] & (at < outputs)[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), inside)


def multiply_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: torch.Tensor,
    tile: ExpertsTile | None = None,
) -> torch.Tensor:
    """Return [P, out] for x [P, in], a weight [experts, out, in] and `starts` [experts + 1].

    The bias is [experts, out]. Rows starts[e] to starts[e + 1] use weight[e]. Sums are fp32, the
    result has x's dtype. The shapes alone choose the tile, so a captured step launches the same
    kernel each time.
    """
    rows, inputs = x.shape
    experts, outputs, _ = weight.shape
    assert weight.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if tile is None:
        tile = select_tile(rows, experts, x.dtype)
    # An expert's last tile may be part full, so there may be one more for each that has rows.
    most_tiles = rows // tile.rows + min(experts, rows)
    _experts_kernel[(triton.cdiv(outputs, tile.outputs), most_tiles)](
        x,
        weight,
        bias,
        starts,
        out,
        x.stride(0),
        experts,
        inputs,
        outputs,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.outputs,
        BLOCK_IN=min(tile.inputs, max(16, triton.next_power_of_2(inputs))),
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(x.device),
    )
    return out


def select_tile(rows: int, experts: int, dtype: torch.dtype) -> ExpertsTile:
    """Return the tile of a program, for the rows of all experts together."""
    if dtype == torch.float32:
        return FP32
    return MANY if rows >= MANY_ROWS * experts else FEW
