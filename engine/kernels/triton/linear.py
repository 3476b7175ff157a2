"""Linear layer for up to 16 rows, limited by the time to read the weight.

Each program computes a few outputs for all rows, in one pass over the inputs. The rows fill up a
tile of the tensor cores to 16. A row's sum takes the inputs in the same order at every row count,
so its bits do not depend on the other rows.

Only a loop with `tl.dot` is pipelined: while one tile is multiplied, the next ones are on their way
from memory. The weight is its first operand, because its outputs are the longer side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.chips import LinearTile
from engine.kernels.triton.overlap import (
    fetch_to_cache,
    launch_options,
    let_next_start,
    wait_for_inputs,
)

MAX_ROWS = 16  # the smallest side of a tile of the tensor cores


TILE = LinearTile(outputs=16, inputs=256, stages=4, warps=2)
# While the kernel before ends, the first programs read AHEAD cache lines of each output's weights.
# Later programs start when the kernel before has ended: then it would only double the requests.
# An H200 holds 4 programs on each of its 132 multiprocessors.
EARLY: tl.constexpr = tl.constexpr(528)
AHEAD: tl.constexpr = tl.constexpr(16)
LINE: tl.constexpr = tl.constexpr(64)  # 16-bit elements of a cache line


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    rows,
    inputs,
    outputs,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_start(OVERLAP)
    row = tl.arange(0, ROWS)
    at = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    weight_rows = weight_ptr + at.to(tl.int64)[:, None] * inputs
    if OVERLAP and tl.program_id(0) < EARLY:
        lines = tl.minimum(tl.arange(0, AHEAD) * LINE, inputs - 1)
        fetch_to_cache(tl.where((at < outputs)[:, None], weight_rows, weight_ptr) + lines[None, :])
    wait_for_inputs(OVERLAP)
    x_rows = x_ptr + row.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for start in tl.range(0, inputs, BLOCK_IN, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_IN)
        inside = column < inputs
        w = tl.load(weight_rows + column[None, :], inside[None, :] & (at < outputs)[:, None], 0.0)
        x = tl.load(x_rows + column[:, None], inside[:, None] & (row < rows)[None, :], 0.0)
        total = tl.dot(w, x, total)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at, at < outputs, 0.0).to(tl.float32)[:, None]
    place = row[None, :] * outputs + at[:, None]
    inside = (row < rows)[None, :] & (at < outputs)[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), inside)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: LinearTile = TILE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b, [T, out] in `dtype`: in the dense `out`, if it is given.

    x is [T, in] with up to MAX_ROWS rows; the weight [out, in] is dense.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert rows <= MAX_ROWS
    assert weight.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    if out is None:
        out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if rows:
        _linear_kernel[(triton.cdiv(outputs, tile.outputs),)](
            x,
            weight,
            bias,
            out,
            x.stride(0),
            rows,
            inputs,
            outputs,
            ROWS=MAX_ROWS,
            BLOCK_OUT=tile.outputs,
            BLOCK_IN=min(tile.inputs, max(16, triton.next_power_of_2(inputs))),
            STAGES=tile.stages,
            num_warps=tile.warps,
            **launch_options(x.device),
        )
    return out
