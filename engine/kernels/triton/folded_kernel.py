"""The kernel of linear layers that also do the work around them: see `folded_linear.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.gated import activated
from engine.kernels.triton.linear import LINE
from engine.kernels.triton.overlap import (
    APART,
    fetch_to_cache,
    held,
    let_next_start,
    wait_for_inputs,
)
from engine.kernels.triton.pairs import sum_in_pairs

CHUNK: tl.constexpr = tl.constexpr(512)  # sums of squares that a program reads at once
AHEAD: tl.constexpr = tl.constexpr(16)  # cache lines of each output that are fetched to L2
# The programs that fetch them: those that start early, 3 on each multiprocessor of an H200.
EARLY: tl.constexpr = tl.constexpr(396)


@triton.jit
def _outputs(outputs, KIND: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Return a program's rows of the weight, which of them exist, and the width of the result.

    If gated, the first half of the rows is of the gate, and the other half of up, `width` behind.
    """
    lane = tl.arange(0, BLOCK_OUT)
    if KIND is None:
        at = tl.program_id(0) * BLOCK_OUT + lane
        return at, at < outputs, outputs
    else:
        width = outputs // 2
        column = tl.program_id(0) * (BLOCK_OUT // 2) + lane % (BLOCK_OUT // 2)
        return column + lane // (BLOCK_OUT // 2) * width, column < width, width


@triton.jit
def _weight_tile(weight_rows, is_output, start, end, BLOCK_IN: tl.constexpr):
    column = start + tl.arange(0, BLOCK_IN)
    return tl.load(weight_rows + column[None, :], is_output[:, None] & (column < end)[None, :], 0.0)


@triton.jit
def _early_tiles(weight_rows, is_output, start, end, TILES: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Load the first TILES tiles of the weight; of the four that are returned, others repeat."""
    w0 = _weight_tile(weight_rows, is_output, start, end, BLOCK_IN)
    w1, w2, w3 = w0, w0, w0
    if TILES > 1:
        w1 = _weight_tile(weight_rows, is_output, start + BLOCK_IN, end, BLOCK_IN)
    if TILES > 2:
        w2 = _weight_tile(weight_rows, is_output, start + 2 * BLOCK_IN, end, BLOCK_IN)
    if TILES > 3:
        w3 = _weight_tile(weight_rows, is_output, start + 3 * BLOCK_IN, end, BLOCK_IN)
    return w0, w1, w2, w3


@triton.jit
def _add_product(total, w, x_rows, norm_ptr, is_row, start, end, OFFSET: tl.constexpr):
    """Return total [outputs, rows] plus w [outputs, inputs] times these inputs of the rows."""
    column = start + tl.arange(0, w.shape[1])
    x = tl.load(x_rows + column[:, None], (column < end)[:, None] & is_row[None, :], 0.0)
    if norm_ptr is not None:
        factor = tl.load(norm_ptr + column, column < end, 0.0).to(tl.float32) + OFFSET
        x = (x.to(tl.float32) * factor[:, None]).to(w.dtype)
    return tl.dot(w, x, total)


@triton.jit
def _chunk_sum(squares_ptr, row, is_row, parts, chunk, PARTS: tl.constexpr):
    """Return the sum of PARTS of the parts of each row, those of this chunk."""
    part = chunk * PARTS + tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & is_row[None, :]
    return sum_in_pairs(tl.load(squares_ptr + part[:, None] + row[None, :] * parts, inside, 0.0))


@triton.jit
def _reciprocal_rms(squares_ptr, row, is_row, parts, inputs, eps, PARTS: tl.constexpr):
    """Return 1 / rms of each row from the sums of squares [rows, parts] of its parts.

    Chunks keep the order of `sum_in_pairs`; all parts at once would not fit into registers.
    """
    fitting: tl.constexpr = CHUNK // row.shape[0]
    least: tl.constexpr = (PARTS + 7) // 8
    size: tl.constexpr = PARTS if fitting > PARTS else fitting if fitting > least else least
    total = _chunk_sum(squares_ptr, row, is_row, parts, 0, size)
    if size < PARTS:
        total += _chunk_sum(squares_ptr, row, is_row, parts, 1, size)
    if 2 * size < PARTS:
        third = _chunk_sum(squares_ptr, row, is_row, parts, 2, size)
        total += third + _chunk_sum(squares_ptr, row, is_row, parts, 3, size)
    if 4 * size < PARTS:
        fifth = _chunk_sum(squares_ptr, row, is_row, parts, 4, size)
        fifth += _chunk_sum(squares_ptr, row, is_row, parts, 5, size)
        seventh = _chunk_sum(squares_ptr, row, is_row, parts, 6, size)
        total += fifth + (seventh + _chunk_sum(squares_ptr, row, is_row, parts, 7, size))
    return tl.rsqrt(total / inputs + eps)


@triton.jit
def _places_of_share(total):
    lane = tl.program_id(0) * total.shape[0] + tl.arange(0, total.shape[0])
    return lane[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]


@triton.jit
def _leave_share(total, shares_ptr, counters_ptr, SHARES: tl.constexpr):
    """Write a program's sums to its share; return whether all other shares have been written."""
    size = tl.num_programs(0) * (total.shape[0] * total.shape[1])
    tl.store(shares_ptr + tl.program_id(1) * size + _places_of_share(total), total)
    tl.debug_barrier()  # all threads have written when one of them counts
    counter = counters_ptr + tl.program_id(0)
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SHARES - 1


@triton.jit
def _sum_of_shares(total, shares_ptr, counters_ptr, SHARES: tl.constexpr):
    """Return the sum of all shares in the order of their inputs; set the counter to 0 again."""
    size = tl.num_programs(0) * (total.shape[0] * total.shape[1])
    places = _places_of_share(total)
    total = tl.load(shares_ptr + places, cache_modifier=".cg")
    for share in tl.static_range(1, SHARES):
        total += tl.load(shares_ptr + share * size + places, cache_modifier=".cg")
    tl.store(counters_ptr + tl.program_id(0), 0)
    return total


@triton.jit
def _finish(total, bias_ptr, residual_ptr, out_ptr, sums_ptr, outputs, rows, KIND: tl.constexpr):
    """Write what the layer makes of a program's products `total` [BLOCK_OUT, ROWS]."""
    at, is_output, width = _outputs(outputs, KIND, total.shape[0])
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at, is_output, 0.0).to(tl.float32)[:, None]
    row = tl.arange(0, total.shape[1])
    if KIND is None:
        column = at
        is_column = is_output
    else:
        halves = tl.reshape(total, [2, total.shape[0] // 2, total.shape[1]])
        gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
        total = activated(gate, KIND) * up
        column = tl.program_id(0) * total.shape[0] + tl.arange(0, total.shape[0])
        is_column = column < width
    place = row.to(tl.int64)[None, :] * width + column[:, None]
    inside = (row < rows)[None, :] & is_column[:, None]
    if residual_ptr is not None:
        total += tl.load(residual_ptr + place, inside, 0.0).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        squares = sum_in_pairs(tl.where(inside, total * total, 0.0))
        tl.store(sums_ptr + row * tl.num_programs(0) + tl.program_id(0), squares, row < rows)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "parts"])
def folded_linear_kernel(
    x_ptr,
    norm_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    sums_ptr,
    shares_ptr,
    counters_ptr,
    x_stride,
    rows,
    parts,
    inputs,
    outputs,
    eps,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE: tl.constexpr,
    EARLY_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_start(OVERLAP)
    row, is_row = tl.arange(0, ROWS), tl.arange(0, ROWS) < rows
    at, is_output, _ = _outputs(outputs, KIND, BLOCK_OUT)
    weight_rows = weight_ptr + at.to(tl.int64)[:, None] * inputs
    first = tl.program_id(1) * SHARE
    end = tl.minimum(first + SHARE, inputs)
    if EARLY_TILES > 0:
        early = _early_tiles(weight_rows, is_output, first, end, EARLY_TILES, BLOCK_IN)
    rest = first + EARLY_TILES * BLOCK_IN
    if OVERLAP != APART and SHARE > EARLY_TILES * BLOCK_IN:
        _fetch_ahead(weight_ptr, weight_rows, is_output, rest, end)
    wait_for_inputs(OVERLAP)
    x_rows = x_ptr + row.to(tl.int64)[None, :] * x_stride
    if norm_ptr is not None:
        scale = _reciprocal_rms(squares_ptr, row, is_row, parts, inputs, eps, PARTS)
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for tile in tl.static_range(EARLY_TILES):
        start = first + tile * BLOCK_IN
        w = held(early[tile], OVERLAP)
        total = _add_product(total, w, x_rows, norm_ptr, is_row, start, end, OFFSET)
    if SHARE > EARLY_TILES * BLOCK_IN:
        for start in tl.range(rest, end, BLOCK_IN, num_stages=STAGES):
            w = _weight_tile(weight_rows, is_output, start, end, BLOCK_IN)
            total = _add_product(total, w, x_rows, norm_ptr, is_row, start, end, OFFSET)
    if norm_ptr is not None:
        total *= scale[None, :]
    if SHARES == 1:
        _finish(total, bias_ptr, residual_ptr, out_ptr, sums_ptr, outputs, rows, KIND)
    elif _leave_share(total, shares_ptr, counters_ptr, SHARES):
        total = _sum_of_shares(total, shares_ptr, counters_ptr, SHARES)
        _finish(total, bias_ptr, residual_ptr, out_ptr, sums_ptr, outputs, rows, KIND)


@triton.jit
def _fetch_ahead(weight_ptr, weight_rows, is_output, start, end):
    """Start to read the next inputs' weights into the L2 cache, in programs that start early."""
    lines = tl.minimum(start + tl.arange(0, AHEAD) * LINE, end - 1)
    program = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    rows = tl.where(is_output[:, None] & (program < EARLY), weight_rows, weight_ptr)
    fetch_to_cache(rows + lines[None, :])
