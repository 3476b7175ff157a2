"""Transpose a matrix in memory, in squares that the registers hold."""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.numba.call import ITEM_BYTES
from engine.kernels.numba.source.llvm import INT32, load, store

SIDE = 16  # of a square
ELEMENTS = [ir.IntType(8 * size) for size in ITEM_BYTES]  # by form


@njit(inline="always")
def transpose(source, target, rows, columns, stride, target_stride, form):
    """Copy the matrix [rows, columns] at the address `source` to `target`, [columns, rows].

    The numbers of `form`, a literal, are moved as they are. `rows` is a multiple of SIDE. Columns
    are copied up to the next multiple of it, so both matrices have room for them. Strides are
    numbers between rows.
    """
    item = ITEM_BYTES[form]
    for top in range(0, rows, SIDE):
        for left in range(0, min(columns, stride), SIDE):
            transpose_square(
                source + item * (top * stride + left),
                target + item * (left * target_stride + top),
                item * stride,
                item * target_stride,
                form,
            )


@intrinsic(prefer_literal=True)
def transpose_square(typing, source, target, source_bytes, target_bytes, form):
    """Transpose a square; `source_bytes` and `target_bytes` are between its rows."""

    def code(context, builder, signature, values):
        source, target, source_bytes, target_bytes, _ = values
        element = ELEMENTS[form.literal_value]
        vector = ir.VectorType(element, SIDE)
        rows = []
        for _ in range(SIDE):
            rows.append(load(builder, source, vector, align=element.width // 8))
            source = builder.add(source, source_bytes)
        for row in _transposed(builder, rows):
            store(builder, row, target, align=element.width // 8)
            target = builder.add(target, target_bytes)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, form), code


def _transposed(builder, rows):
    """Return the columns of the square `rows`.

    A step takes turns between the lanes of rows i and i + 8. It moves one bit of a number's row to
    its lane, and one bit of the lane to the row. After four steps all bits have moved.
    """
    half = SIDE // 2
    lows = _lanes(lane // 2 + lane % 2 * SIDE for lane in range(SIDE))
    highs = _lanes(half + lane // 2 + lane % 2 * SIDE for lane in range(SIDE))
    for _ in range(half.bit_length()):
        pairs = list(zip(rows[:half], rows[half:], strict=True))
        rows = [
            builder.shuffle_vector(first, second, lanes)
            for first, second in pairs
            for lanes in (lows, highs)
        ]
    return rows


def _lanes(numbers):
    return ir.Constant(ir.VectorType(INT32, SIDE), list(numbers))
