"""Low-rank adapters of a linear layer: shrink to A x, then expand by B and add to the outputs.

A program computes the tokens of one adapter in a tile of tokens, and ends at once if there are
none. So every output is written by one program, and a token's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS = 16  # the smallest side of a tile of the tensor cores
BLOCK_IN, BLOCK_WIDTH, BLOCK_OUT = 128, 32, 64
MOST_RANK = 128  # multiplied at a time; more would not fit in registers and shared memory


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    slots_ptr,
    shrunk_ptr,
    x_stride,
    tokens,
    inputs,
    width,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.program_id(2) + 1
    own = tl.load(slots_ptr + token, token < tokens, 0) == slot
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a_rows = a_ptr + ((slot - 1).to(tl.int64) * width + row)[:, None] * inputs
    x_rows = x_ptr + token.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        inside = column < inputs
        x = tl.load(x_rows + column[None, :], own[:, None] & inside[None, :], 0.0)
        a = tl.load(a_rows + column[None, :], (row < width)[:, None] & inside[None, :], 0.0)
        total = tl.dot(x, a.trans(), total, input_precision="ieee")
    place = token.to(tl.int64)[:, None] * width + row[None, :]
    inside = own[:, None] & (row < width)[None, :]
    tl.store(shrunk_ptr + place, total.to(shrunk_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    shrunk_ptr,
    b_ptr,
    slots_ptr,
    starts_ptr,
    y_ptr,
    y_stride,
    tokens,
    outputs,
    rank,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.program_id(2) + 1
    own = tl.load(slots_ptr + token, token < tokens, 0) == slot
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_rows = b_ptr + ((slot - 1).to(tl.int64) * outputs + row)[:, None] * rank
    shrunk_rows = shrunk_ptr + token.to(tl.int64)[:, None] * (PARTS * rank)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for part in range(PARTS):
        in_part = (row >= tl.load(starts_ptr + part)) & (row < tl.load(starts_ptr + part + 1))
        for first in range(0, rank, BLOCK_RANK):
            column = first + tl.arange(0, BLOCK_RANK)
            inside_rank = column < rank
            h_columns = shrunk_rows + (part * rank + column)[None, :]
            h = tl.load(h_columns, own[:, None] & inside_rank[None, :], 0.0)
            b = tl.load(b_rows + column[None, :], in_part[:, None] & inside_rank[None, :], 0.0)
            total = tl.dot(h, b.trans(), total, input_precision="ieee")
    place = y_ptr + token.to(tl.int64)[:, None] * y_stride + row[None, :]
    inside = own[:, None] & (row < outputs)[None, :]
    y = tl.load(place, inside, 0.0).to(tl.float32) + total
    tl.store(place, y.to(y_ptr.dtype.element_ty), inside)


def add_low_rank(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Add B A x to y [T, out] in place, and return it.

    x is [T, in], a [S, parts * rank, in], b [S, out, rank] and slots [T] int32. `starts` is
    [parts + 1] int32: the output rows where the parts begin, and the last one ends.
    """
    tokens, inputs = x.shape
    num_slots, width, _ = a.shape
    outputs, rank = b.shape[1:]
    x = x if x.stride(1) == 1 else x.contiguous()
    assert y.stride(1) == 1
    shrunk = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(tokens, TOKENS)
    _shrink_kernel[(tiles, triton.cdiv(width, BLOCK_WIDTH), num_slots)](
        x,
        a,
        slots,
        shrunk,
        x.stride(0),
        tokens,
        inputs,
        width,
        TILE=TOKENS,
        BLOCK=BLOCK_WIDTH,
        BLOCK_IN=BLOCK_IN,
    )
    _expand_kernel[(tiles, triton.cdiv(outputs, BLOCK_OUT), num_slots)](
        shrunk,
        b,
        slots,
        starts,
        y,
        y.stride(0),
        tokens,
        outputs,
        rank,
        PARTS=width // rank,
        TILE=TOKENS,
        BLOCK=BLOCK_OUT,
        BLOCK_RANK=min(MOST_RANK, max(16, triton.next_power_of_2(rank))),
    )
    return y
