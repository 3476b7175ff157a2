"""One token's change of a tile of columns of a recurrent state, instruction by instruction.

The sums over the rows stay in registers. A column's terms are added row after row, so its bits do
not depend on the width of its tile.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.source.llvm import FP32, INT64, declare, load, prefetch, spread, store
from engine.kernels.numba.source.sum_tiles import LANES

WIDEST = 4 * LANES  # columns of a tile: 64 rows of it fill half of an L1 cache
WIDTHS = (1, LANES, WIDEST)
NAME = "advance_tile"
CHANGES, LOOKS = 2 * WIDEST, 4 * WIDEST  # added to a width: what a pass does


class _Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs. All arrays are fp32."""

    old: ir.Value  # address of [rows, width] before the token
    old_stride: ir.Value  # bytes between rows
    new: ir.Value  # address of [rows, width] behind the token; it may be `old`, or 0
    new_stride: ir.Value
    rows: ir.Value
    key: ir.Value  # address of [rows]
    change: ir.Value  # address of [width]
    query: ir.Value  # address of [rows]
    out: ir.Value  # address of [width]
    next_key: ir.Value  # address of [rows], or 0
    held: ir.Value  # address of [width]
    ahead: ir.Value  # address of [rows, width], with rows like the old, that is prefetched
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
    ahead,
    keep,
    width,
):
    """Compute new = keep * old + key change^T, out = new^T query and held = new^T next_key.

    `_Operands` describes the arguments. Without `next_key`, `held` is not computed. Without `new`
    nothing changes: only held = old^T next_key is computed. `width` is one of WIDTHS.
    """

    def code(context, builder, signature, values):
        *operands, width = values
        changes = _is_given(builder, operands[2])
        looks = _is_given(builder, operands[9])
        size = builder.add(width, builder.mul(INT64(CHANGES), changes))
        size = builder.add(size, builder.mul(INT64(LOOKS), looks))
        builder.call(_tiles(builder.module), [*operands, size])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12, types.float32, types.int64), code


def _is_given(builder, address):
    """Return 1 as INT64, or 0 if the address is 0."""
    return builder.zext(builder.icmp_unsigned("!=", address, INT64(0)), INT64)


def _tiles(module):
    """Return the function that advances a tile of any width; the module gets it once."""
    known = module.globals.get(NAME)
    if known is None:
        parameters = [INT64] * 12 + [FP32, INT64]
        known = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), NAME)
        known.linkage = "internal"
        _define(known)
    return known


def _define(function):
    """Write the code of all widths and of all kinds of passes, and a jump to the given one."""
    *operands, size = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    unknown = function.append_basic_block("unknown")
    jump = builder.switch(size, unknown)
    for kind in (CHANGES, LOOKS, CHANGES + LOOKS):
        for width in WIDTHS:
            block = function.append_basic_block(f"tile_{kind + width}")
            jump.add_case(INT64(kind + width), block)
            builder.position_at_end(block)
            _emit(builder, _Operands(*operands), width, kind != LOOKS, kind != CHANGES)
            builder.ret_void()
    builder.position_at_end(unknown)
    builder.unreachable()


def _emit(builder, operands, width, changes_state, looks):
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
        ahead = row_of(operands.ahead, operands.old_stride, loop.index)
        if changes_state:
            key = number(operands.key, loop.index)
            query = number(operands.query, loop.index)
        next_key = number(operands.next_key, loop.index) if looks else None
        for index, place in enumerate(places):
            prefetch(builder, builder.add(ahead, place), locality=2)
            state = load(builder, builder.add(old, place), vector, 4)
            if changes_state:
                kept = builder.fmul(state, keep)
                state = builder.call(fma, [key, changes[index], kept])
                store(builder, state, builder.add(new, place), 4)
                add(state, query, outs[index])
            if looks:
                add(state, next_key, helds[index])
    for index, place in enumerate(places):
        if changes_state:
            store(builder, builder.load(outs[index]), builder.add(operands.out, place), 4)
        if looks:
            store(builder, builder.load(helds[index]), builder.add(operands.held, place), 4)
