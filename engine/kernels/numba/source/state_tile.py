"""One token's change of a tile of columns of a recurrent state, instruction by instruction.

The sums over the rows stay in registers. A column's terms are added row after row, so its bits do
not depend on the width of its tile.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.source.llvm import FP32, INT64, declare, load, spread, store
from engine.kernels.numba.source.sum_rows import LANES

WIDEST = 2 * LANES  # columns of a tile. 128 rows of it fill half of an L1 cache
WIDTHS = (1, LANES, WIDEST)
NAME = "advance_tile"


@njit(inline="always")
def tile_width(columns):
    """Return the width of the next tile if `columns` are left."""
    if columns >= WIDEST:
        return WIDEST
    return LANES if columns >= LANES else 1


class _Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs. All arrays are fp32."""

    old: ir.Value  # address of [rows, width] before the token
    old_stride: ir.Value  # bytes between rows
    new: ir.Value  # address of [rows, width] behind the token; it may be `old`
    new_stride: ir.Value
    rows: ir.Value
    key: ir.Value  # address of [rows]
    change: ir.Value  # address of [width]
    query: ir.Value  # address of [rows]
    out: ir.Value  # address of [width]
    next_key: ir.Value  # address of [rows], or 0
    held: ir.Value  # address of [width]
    keep: ir.Value  # fp32


@intrinsic
def advance(
    typing,
    old,
    old_stride,
    new,
    new_stride,
    rows,
    key,
    change,
    query,
    out,
    next_key,
    held,
    keep,
    width,
):
    """Compute new = keep * old + key change^T, out = new^T query and held = new^T next_key.

    `_Operands` describes the arguments. Without `next_key`, `held` is not computed. `width` is one
    of WIDTHS.
    """

    def code(context, builder, signature, values):
        *operands, width = values
        looks = builder.icmp_unsigned("!=", operands[9], INT64(0))
        size = builder.add(width, builder.select(looks, INT64(WIDEST), INT64(0)))
        builder.call(_tiles(builder.module), [*operands, size])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11, types.float32, types.int64), code


def _tiles(module):
    """Return the function that advances a tile of any width; the module gets it once."""
    known = module.globals.get(NAME)
    if known is None:
        parameters = [INT64] * 11 + [FP32, INT64]
        known = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), NAME)
        known.linkage = "internal"
        _define(known)
    return known


def _define(function):
    """Write the code of all widths, with and without the next key, and a jump to the given one."""
    *operands, size = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    unknown = function.append_basic_block("unknown")
    jump = builder.switch(size, unknown)
    for looks in (False, True):
        for width in WIDTHS:
            block = function.append_basic_block(f"tile_{width}_{int(looks)}")
            jump.add_case(INT64(width + WIDEST * looks), block)
            builder.position_at_end(block)
            _emit(builder, _Operands(*operands), width, looks)
            builder.ret_void()
    builder.position_at_end(unknown)
    builder.unreachable()


def _emit(builder, operands, width, looks):
    """Emit the loop over the rows of a tile."""
    lanes = min(width, LANES)
    vector = ir.VectorType(FP32, lanes)
    fma = declare(builder, f"llvm.fma.v{lanes}f32", vector, [vector] * 3)
    places = [INT64(4 * column) for column in range(0, width, lanes)]
    changes = [load(builder, builder.add(operands.change, at), vector, 4) for at in places]
    keep = spread(builder, operands.keep, lanes)
    zeros = ir.Constant(vector, None)
    outs = [cgutils.alloca_once_value(builder, zeros) for _ in places]
    helds = [cgutils.alloca_once_value(builder, zeros) for _ in places]

    def row_of(address, stride, row):
        return builder.add(address, builder.mul(stride, row))

    def number(address, row):
        place = row_of(address, INT64(4), row)
        return spread(builder, load(builder, place, FP32, 4), lanes)

    def add(state, factor, total):
        builder.store(builder.call(fma, [state, factor, builder.load(total)]), total)

    with cgutils.for_range(builder, operands.rows) as loop:
        old = row_of(operands.old, operands.old_stride, loop.index)
        new = row_of(operands.new, operands.new_stride, loop.index)
        key = number(operands.key, loop.index)
        query = number(operands.query, loop.index)
        next_key = number(operands.next_key, loop.index) if looks else None
        for index, place in enumerate(places):
            state = load(builder, builder.add(old, place), vector, 4)
            kept = builder.fmul(state, keep)
            state = builder.call(fma, [key, changes[index], kept])
            store(builder, state, builder.add(new, place), 4)
            add(state, query, outs[index])
            if looks:
                add(state, next_key, helds[index])
    for index, place in enumerate(places):
        store(builder, builder.load(outs[index]), builder.add(operands.out, place), 4)
        if looks:
            store(builder, builder.load(helds[index]), builder.add(operands.held, place), 4)
