"""Linear layer with a quantised weight: a tile of codes becomes numbers in registers.

One kernel serves all numbers of rows, with tiles of its own for few, some and many. Up to 64 rows,
reading the weight takes most of the time: a program computes some outputs for all rows, and each
byte is read once. Up to 16 rows share a tile of the tensor cores. A row's sum takes the inputs in
the same order at each of these row counts; other tiles may have instructions of another order.

The weight is the first operand of `tl.dot`, because a tensor core reads only that one from
registers. Activations keep their dtype, and sums are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.overlap import launch_options, wait_for_inputs

MAX_FEW_ROWS = 16  # the smallest side of a tile of the tensor cores


class CodesTile(NamedTuple):
    """The tile of a program: outputs, inputs read at a time, tiles in flight, and warps."""

    outputs: int
    inputs: int
    stages: int
    warps: int


FEW_ROWS_TILE = CodesTile(outputs=16, inputs=256, stages=4, warps=2)
SOME_ROWS_TILE = CodesTile(outputs=32, inputs=128, stages=4, warps=4)
MANY_ROWS_TILE = CodesTile(outputs=128, inputs=64, stages=3, warps=8)
SOME_ROWS, MOST_ROWS = 64, 128  # of a program
# In fp32 no tensor core multiplies, and a thread holds its part of a tile in registers.
FP32_TILE = CodesTile(outputs=16, inputs=32, stages=2, warps=4)


@triton.jit
def _from_e4m3(codes):
    """Return bytes of e4m3 in fp32.

    A shift makes the code an fp16 number of 2^-8 times its value. Conversion instructions of this
    format begin with sm_89. NaN becomes 480; a group with NaN has the scale NaN.
    """
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit(do_not_specialize=["rows"])
def _codes_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    rows,
    inputs,
    outputs,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 2 if KIND == "int4" else 1
    GROUPS: tl.constexpr = BLOCK_IN // GROUP if BLOCK_IN > GROUP else 1
    # Programs that share a tile of the weight follow each other, and find it in the L2 cache.
    row_tiles = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(0) // row_tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = (at < outputs)[:, None]
    row_bytes = inputs // PER_BYTE
    code_rows = codes_ptr + at.to(tl.int64)[:, None] * row_bytes
    group_rows = at.to(tl.int64)[:, None] * groups
    x_rows = x_ptr + row.to(tl.int64)[None, :] * x_stride
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for start in tl.range(0, inputs, BLOCK_IN, num_stages=STAGES):
        place = start // PER_BYTE + tl.arange(0, BLOCK_IN // PER_BYTE)[None, :]
        codes = tl.load(code_rows + place, (place < row_bytes) & is_output, 0)
        if KIND == "int4":
            values = tl.interleave(codes & 15, codes >> 4).to(tl.float32)
        elif KIND == "int8":
            values = codes.to(tl.float32) - 128.0
        else:
            values = _from_e4m3(codes)
        group = start // GROUP + tl.arange(0, GROUPS)[None, :]
        inside = (group < groups) & is_output
        scales = tl.load(scales_ptr + group_rows + group, inside, 0.0).to(tl.float32)
        values = tl.reshape(values, [BLOCK_OUT, GROUPS, BLOCK_IN // GROUPS]) * scales[:, :, None]
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + group_rows + group, inside, 0.0).to(tl.float32)
            values += offsets[:, :, None]
        w = tl.reshape(values, [BLOCK_OUT, BLOCK_IN]).to(x_ptr.dtype.element_ty)
        column = start + tl.arange(0, BLOCK_IN)
        x = tl.load(
            x_rows + column[:, None], (column < inputs)[:, None] & (row < rows)[None, :], 0.0
        )
        total = tl.dot(w, x, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at, at < outputs, 0.0).to(tl.float32)[:, None]
    out_rows = out_ptr + row.to(tl.int64)[None, :] * outputs
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_rows + at[:, None], total, (row < rows)[None, :] & is_output)


def multiply_codes(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    kind: str,
    group: int,
) -> torch.Tensor:
    """Return x W^T + b, [T, out] in `dtype`, for x [T, in]. The weight is as in `CodeRows`.

    `kind` is int8, int4 or fp8. `group` inputs, a power of two, share a scale.
    """
    rows, inputs = x.shape
    outputs, groups = scales.shape
    assert codes.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if rows:
        tile, tile_rows = select_tile(rows, x.dtype)
        programs = triton.cdiv(outputs, tile.outputs) * triton.cdiv(rows, tile_rows)
        _codes_kernel[(programs,)](
            x,
            codes,
            scales,
            offsets,
            bias,
            out,
            x.stride(0),
            rows,
            inputs,
            outputs,
            groups,
            KIND=kind,
            GROUP=group,
            ROWS=tile_rows,
            BLOCK_OUT=tile.outputs,
            BLOCK_IN=tile.inputs,
            STAGES=tile.stages,
            num_warps=tile.warps,
            **launch_options(x.device),
        )
    return out


def select_tile(rows: int, dtype: torch.dtype) -> tuple[CodesTile, int]:
    """Return the tile of a program, and its rows."""
    if dtype == torch.float32:
        return FP32_TILE, MAX_FEW_ROWS
    if rows <= MAX_FEW_ROWS:
        return FEW_ROWS_TILE, MAX_FEW_ROWS
    if rows <= SOME_ROWS:
        return SOME_ROWS_TILE, triton.next_power_of_2(rows)
    return MANY_ROWS_TILE, MOST_ROWS
