"""Linear layer for up to 8 rows, limited by the time to read the weight.

Each program computes a few outputs for all rows, in one pass over the inputs. Few rows cannot fill
a tensor core tile, so the products are summed in fp32 on the ordinary cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_ROWS = 8
# Rows, padded to a power of two: (outputs per program, inputs read at a time). Every program reads
# the inputs of all rows again, so more rows use fewer and larger programs. The sizes follow from
# registers and loads in flight; they are not tuned on a GPU.
BLOCKS = {1: (4, 1024), 2: (8, 512), 4: (8, 256), 8: (16, 128)}


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
):
    row = tl.arange(0, ROWS)
    at = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    weight_rows = weight_ptr + at.to(tl.int64)[:, None] * inputs
    total = tl.zeros([ROWS, BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in range(0, inputs, BLOCK_IN):
        column = (start + tl.arange(0, BLOCK_IN))[None, :]
        inside = column < inputs
        w = tl.load(weight_rows + column, inside & (at < outputs)[:, None], 0.0)
        x = tl.load(x_ptr + row[:, None] * x_stride + column, inside & (row < rows)[:, None], 0.0)
        total += w.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
    y = tl.sum(total, 2)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, at < outputs, 0.0).to(tl.float32)[None, :]
    place = row[:, None] * outputs + at[None, :]
    inside = (row < rows)[:, None] & (at < outputs)[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), inside)


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return x W^T + b, [T, out] in `dtype`.

    x is [T, in] with up to MAX_ROWS rows; the weight [out, in] is dense.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert rows <= MAX_ROWS
    assert weight.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if rows:
        padded = triton.next_power_of_2(rows)
        block_out, block_in = BLOCKS[padded]
        _linear_kernel[(triton.cdiv(outputs, block_out),)](
            x,
            weight,
            bias,
            out,
            x.stride(0),
            rows,
            inputs,
            outputs,
            ROWS=padded,
            BLOCK_OUT=block_out,
            BLOCK_IN=min(block_in, triton.next_power_of_2(inputs)),
        )
    return out
