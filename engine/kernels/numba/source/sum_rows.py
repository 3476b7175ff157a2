"""Sums of weighted rows of a matrix, written out instruction by instruction.

They are not left to LLVM's vectorizer: the sums stay in registers, and their order is the same in
every kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import AS_BF16, AS_E4M3, AS_FP32, AS_INT8, CACHE_LINE
from engine.kernels.numba.cpu import has_avx512
from engine.kernels.numba.source.llvm import (
    FP32,
    INT8,
    INT16,
    INT64,
    declare,
    element_bytes,
    prefetch,
    spread,
    widen_e4m3_vector,
    widen_int8_vector,
    widen_vector,
)

MAX_ROWS = 6  # of a tile


class _Form(NamedTuple):
    """How the numbers of a matrix lie in memory."""

    element: ir.Type
    to_fp32: Callable[..., ir.Value]  # of (builder, vector of elements, lanes)


def _as_they_are(builder, numbers, lanes):
    return numbers


FORMS = {
    AS_FP32: _Form(FP32, _as_they_are),
    AS_BF16: _Form(INT16, widen_vector),
    AS_INT8: _Form(INT8, widen_int8_vector),
    AS_E4M3: _Form(INT8, widen_e4m3_vector),
}


class Tile(NamedTuple):
    """The sums that registers hold: rows of `columns` vectors of `lanes` fp32."""

    lanes: int
    rows: int  # at most
    columns: int


def register_tile(width: int) -> Tile:
    """Return the tile for rows of `width` numbers, a multiple of 8, on the target CPU.

    AVX-512 has 32 registers of 16 fp32, older CPUs have 16 of 8.
    """
    if not has_avx512():
        return Tile(lanes=8, rows=4, columns=2)
    lanes = 16 if width % 16 == 0 else 8
    return Tile(lanes, rows=MAX_ROWS, columns=4)


@intrinsic(prefer_literal=True)
def sum_rows(typing, out, keep, weights, stride, matrix, ahead, count, rows, width, form):
    """out[r] = keep[r] * out[r] + weights[r, 0] * matrix[0] + weights[r, 1] * matrix[1] + ...

    The terms are added in this order. `_Operands` describes the arguments. If `keep` is a literal
    0, the old `out` is ignored. `form` is that of the matrix: AS_FP32, AS_BF16, AS_INT8 or AS_E4M3.
    `rows`, `width` and `form` are literals.
    """
    arguments = out, keep, weights, stride, matrix, ahead, count, rows, width, form
    is_fresh = isinstance(keep, types.IntegerLiteral)

    def code(context, builder, signature, values):
        operands = _Operands(*values[:7])
        shape = _Shape(rows.literal_value, width.literal_value, FORMS[form.literal_value])
        sums = _Sums(builder, operands, shape, is_fresh=is_fresh)
        sums.emit()
        return context.get_dummy_value()

    return types.void(*arguments), code


class _Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs."""

    out: ir.Value  # address of [rows, width] fp32
    keep: ir.Value  # address of [rows] fp32
    weights: ir.Value  # address of [rows, stride] fp32
    stride: ir.Value
    matrix: ir.Value  # address of [count, width]
    ahead: ir.Value  # address of another matrix, to prefetch
    count: ir.Value


class _Shape(NamedTuple):
    """Sizes that are known when the kernel is compiled."""

    rows: int
    width: int
    form: _Form  # of the matrix


@dataclass(frozen=True)
class _Array:
    """A two-dimensional array in memory."""

    address: ir.Value
    stride: ir.Value  # elements between rows
    element: ir.Type

    def pointer(self, builder, row, column, kind):
        """Return a pointer of type `kind` to [row, column]."""
        number = builder.add(builder.mul(row, self.stride), column)
        distance = builder.mul(number, INT64(element_bytes(self.element)))
        address = builder.add(self.address, distance)
        return builder.inttoptr(address, kind.as_pointer())


class _Cell(NamedTuple):
    """A vector of `out` that a register sums: a row, from `column` on."""

    row: int
    column: int
    place: ir.Value  # pointer into `out`


class _Sums:
    """Code generator of `sum_rows` for one shape."""

    def __init__(self, builder, operands, shape, *, is_fresh):
        width = INT64(shape.width)
        self._builder = builder
        self._shape = shape
        self._is_fresh = is_fresh
        self._count = operands.count
        self._out = _Array(operands.out, width, FP32)
        self._keep = _Array(operands.keep, INT64(1), FP32)
        self._weights = _Array(operands.weights, operands.stride, FP32)
        self._matrix = _Array(operands.matrix, width, shape.form.element)
        self._ahead = _Array(operands.ahead, width, shape.form.element)
        self._tile = register_tile(shape.width)
        self._vector = ir.VectorType(FP32, self._tile.lanes)
        name = f"llvm.fma.v{self._tile.lanes}f32"
        self._fma = declare(builder, name, self._vector, [self._vector] * 3)

    def emit(self):
        width = self._tile.columns * self._tile.lanes
        tiles = math.ceil(self._shape.rows / self._tile.rows)
        height = math.ceil(self._shape.rows / tiles)  # of tiles of about equal height
        for top in range(0, self._shape.rows, height):
            for left in range(0, self._shape.width, width):
                bottom = min(self._shape.rows, top + height)
                right = min(self._shape.width, left + width)
                rows = range(top, bottom)
                columns = range(left, right, self._tile.lanes)
                is_first = top == left == 0
                self._emit_tile(rows, columns, is_first=is_first)

    def _emit_tile(self, rows, columns, *, is_first):
        """Emit the sums of a few rows and columns over the whole matrix."""
        builder = self._builder
        cells = [self._cell(row, column) for row in rows for column in columns]
        starts = [self._start(cell) for cell in cells]
        registers = [cgutils.alloca_once_value(builder, start) for start in starts]
        with cgutils.for_range(builder, self._count) as loop:
            if is_first:
                self._prefetch(loop.index)
            matrix = {column: self._load_vector(loop.index, column) for column in columns}
            weights = {row: self._load_weight(row, loop.index) for row in rows}
            for cell, register in zip(cells, registers, strict=True):
                self._add(weights[cell.row], matrix[cell.column], register)
        for cell, register in zip(cells, registers, strict=True):
            finished = builder.load(register)
            builder.store(finished, cell.place, align=4)

    def _cell(self, row, column):
        builder = self._builder
        place = self._out.pointer(builder, INT64(row), INT64(column), self._vector)
        return _Cell(row, column, place)

    def _start(self, cell):
        """Return the sum before the first term."""
        if self._is_fresh:
            return ir.Constant(self._vector, None)  # zeros
        keep = self._load_spread(self._keep, INT64(cell.row), INT64(0))
        old = self._builder.load(cell.place, align=4)
        return self._builder.fmul(old, keep)

    def _add(self, weight, numbers, register):
        builder = self._builder
        old = builder.load(register)
        new = builder.call(self._fma, [weight, numbers, old])
        builder.store(new, register)

    def _load_vector(self, row, column):
        """Load one vector of the matrix as fp32."""
        builder = self._builder
        element, to_fp32 = self._shape.form
        lanes = self._tile.lanes
        vector = ir.VectorType(element, lanes)
        place = self._matrix.pointer(builder, row, INT64(column), vector)
        numbers = builder.load(place, align=element_bytes(element))
        return to_fp32(builder, numbers, lanes)

    def _load_weight(self, row, matrix_row):
        return self._load_spread(self._weights, INT64(row), matrix_row)

    def _load_spread(self, array, row, column):
        """Load the fp32 number at [row, column] into every lane."""
        builder = self._builder
        place = array.pointer(builder, row, column, FP32)
        number = builder.load(place, align=4)
        return spread(builder, number, self._tile.lanes)

    def _prefetch(self, row):
        builder = self._builder
        step = CACHE_LINE // element_bytes(self._shape.form.element)
        for column in range(0, self._shape.width, step):
            place = self._ahead.pointer(builder, row, INT64(column), INT8)
            prefetch(builder, place, locality=3)
