"""The code of tiles of sums, written out instruction by instruction.

They are not left to LLVM's vectorizer: the sums stay in registers, and their order is the same in
every kernel. Sizes are known only when the kernel runs. So the kernel contains the code of every
tile of sums that the registers can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from engine.kernels.numba.call import (
    AS_BF16,
    AS_E4M3,
    AS_FP32,
    AS_INT8,
    CACHE_LINE,
    IN_PAIRS,
)
from engine.kernels.numba.cpu import has_avx512
from engine.kernels.numba.source.llvm import (
    BF16,
    FP32,
    INT8,
    INT16,
    INT32,
    INT64,
    declare,
    element_bytes,
    load,
    prefetch,
    spread,
    widen_e4m3_vector,
    widen_int8_vector,
    widen_vector,
)

ROWS_TOGETHER = 6  # that are worth summing in one pass over the matrix
NARROWEST = 8  # columns; the number of columns is a multiple of it


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
    IN_PAIRS: _Form(INT16, _as_they_are),
}


class Tile(NamedTuple):
    """The most sums that registers hold: rows of `columns` vectors of `lanes` fp32."""

    lanes: int
    rows: int
    columns: int


def register_tile() -> Tile:
    """Return the tile of the target CPU.

    AVX-512 has 32 registers of 16 fp32, older CPUs have 16 of 8.
    """
    if has_avx512():
        return Tile(lanes=16, rows=ROWS_TOGETHER, columns=4)
    return Tile(lanes=8, rows=4, columns=2)


LANES, MOST_ROWS, MOST_VECTORS = register_tile()
MOST_COLUMNS = LANES * MOST_VECTORS


def tiles_of(module, form):
    """Return the function that sums a tile of any size; the module gets it once."""
    name = f"add_tile_{form}"
    known = module.globals.get(name)
    if known is None:
        parameters = [INT64] * (len(Operands._fields) - 1) + [FP32, INT64]
        known = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), name)
        known.linkage = "internal"
        _define_tiles(known, FORMS[form], _SumsOfPairs if form == IN_PAIRS else _Sums)
    return known


def _define_tiles(function, form, sums):
    """Write the code of all tiles by `sums`, and a jump to the one of the given size."""
    *operands, size = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    unknown = function.append_basic_block("unknown")
    jump = builder.switch(size, unknown)
    widths = {NARROWEST, *range(LANES, MOST_COLUMNS + 1, LANES)}
    for rows in range(1, MOST_ROWS + 1):
        for columns in sorted(widths):
            block = function.append_basic_block(f"tile_{rows}_{columns}")
            jump.add_case(INT64(rows * MOST_COLUMNS + columns), block)
            builder.position_at_end(block)
            sums(builder, Operands(*operands), rows, columns, form).emit()
            builder.ret_void()
    builder.position_at_end(unknown)
    builder.unreachable()


class Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs."""

    out: ir.Value  # address of [rows, width] fp32
    width: ir.Value
    keep: ir.Value  # address of [rows] fp32, or 0
    weights: ir.Value  # address of [rows, stride] fp32, or bf16 in pairs
    stride: ir.Value
    parts: ir.Value  # address of [parts, vectors] addresses of vectors in a part's first row
    ahead: ir.Value  # address of [parts, vectors] addresses from which as much is prefetched
    vectors: ir.Value
    part_rows: ir.Value  # an even number
    row_bytes: ir.Value  # between two rows of a part
    count: ir.Value  # rows of the matrix; the last part may have fewer than the others
    factor: ir.Value  # of sums in pairs, once they are finished; fp32


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
    """A vector of `out` that a register sums: a row, from vector number `column` on."""

    row: int
    column: int
    place: ir.Value  # pointer into `out`


class _Part(NamedTuple):
    """Rows of the matrix that lie at the same distance from each other."""

    first: ir.Value  # row
    count: ir.Value  # of rows
    columns: list[ir.Value]  # addresses of the tile's vectors in the first row
    ahead: list[ir.Value]  # addresses from which as much is prefetched


class _Sums:
    """Code generator of one tile."""

    def __init__(self, builder, operands, rows, columns, form):
        self._builder = builder
        self._operands = operands
        self._rows = range(rows)
        self._lanes = min(columns, LANES)
        self._columns = range(columns // self._lanes)
        self._form = form
        self._has_old = builder.icmp_unsigned("!=", operands.keep, INT64(0))
        self._out = _Array(operands.out, operands.width, FP32)
        self._keep = _Array(operands.keep, INT64(1), FP32)
        self._weights = _Array(operands.weights, operands.stride, FP32)
        self._vector = ir.VectorType(FP32, self._lanes)
        name = f"llvm.fma.v{self._lanes}f32"
        self._fma = declare(builder, name, self._vector, [self._vector] * 3)

    def emit(self):
        """Emit the sums over the whole matrix."""
        builder = self._builder
        cells = [self._cell(row, column) for row in self._rows for column in self._columns]
        registers = self._start(cells)
        self._add_all(dict(zip(cells, registers, strict=True)))
        for cell, register in zip(cells, registers, strict=True):
            finished = builder.load(register)
            builder.store(finished, cell.place, align=4)

    def _add_all(self, registers):
        """Add all terms to the registers, by cell."""
        builder, operands = self._builder, self._operands
        rounded_up = builder.add(operands.count, builder.sub(operands.part_rows, INT64(1)))
        parts = builder.udiv(rounded_up, operands.part_rows)
        with cgutils.for_range(builder, parts) as loop:
            first = builder.mul(loop.index, operands.part_rows)
            rest = builder.sub(operands.count, first)
            is_last = builder.icmp_signed("<", rest, operands.part_rows)
            count = builder.select(is_last, rest, operands.part_rows)
            columns = self._addresses(operands.parts, loop.index)
            ahead = self._addresses(operands.ahead, loop.index)
            self._add_part(_Part(first, count, columns, ahead), registers)

    def _addresses(self, table, part):
        """Return the addresses in a row of a table, one for each vector of the tile."""
        builder = self._builder
        array = _Array(table, self._operands.vectors, INT64)
        places = [array.pointer(builder, part, INT64(column), INT64) for column in self._columns]
        return [builder.load(place, align=8) for place in places]

    def _add_part(self, part, registers):
        """Add the terms of a part's rows."""
        builder = self._builder
        with cgutils.for_range(builder, part.count) as loop:
            self._prefetch(part, loop.index, rows=1)
            matrix = [self._load_vector(part, loop.index, column) for column in self._columns]
            number = builder.add(part.first, loop.index)
            weights = [self._load_weight(row, number) for row in self._rows]
            for cell, register in registers.items():
                self._add(weights[cell.row], matrix[cell.column], register)

    def _cell(self, row, column):
        builder = self._builder
        left = INT64(column * self._lanes)
        return _Cell(row, column, self._out.pointer(builder, INT64(row), left, self._vector))

    def _start(self, cells):
        """Return registers with the sums before the first term."""
        builder = self._builder
        zeros = ir.Constant(self._vector, None)
        registers = [cgutils.alloca_once_value(builder, zeros) for _ in cells]
        with builder.if_then(self._has_old):
            for cell, register in zip(cells, registers, strict=True):
                keep = self._load_spread(self._keep, INT64(cell.row), INT64(0))
                old = builder.load(cell.place, align=4)
                builder.store(builder.fmul(old, keep), register)
        return registers

    def _add(self, weight, numbers, register):
        builder = self._builder
        old = builder.load(register)
        new = builder.call(self._fma, [weight, numbers, old])
        builder.store(new, register)

    def _load_vector(self, part, row, column):
        """Load one vector of a part's row as fp32."""
        builder = self._builder
        element, to_fp32 = self._form
        lanes = self._lanes
        distance = builder.mul(row, self._operands.row_bytes)
        address = builder.add(part.columns[column], distance)
        numbers = load(builder, address, ir.VectorType(element, lanes), element_bytes(element))
        return to_fp32(builder, numbers, lanes)

    def _load_weight(self, row, matrix_row):
        return self._load_spread(self._weights, INT64(row), matrix_row)

    def _load_spread(self, array, row, column):
        """Load the fp32 number at [row, column] into every lane."""
        builder = self._builder
        place = array.pointer(builder, row, column, FP32)
        number = builder.load(place, align=4)
        return spread(builder, number, self._lanes)

    def _prefetch(self, part, row, rows):
        """Prefetch as many bytes as the tile's vectors of `rows` rows have, up to a cache line."""
        builder = self._builder
        vector_bytes = element_bytes(self._form.element) * self._lanes
        assert rows * vector_bytes <= CACHE_LINE
        distance = builder.mul(row, INT64(vector_bytes))
        for first in part.ahead:
            prefetch(builder, builder.add(first, distance), locality=2)


class _SumsOfPairs(_Sums):
    """Code generator of one tile whose weights and matrix are bf16."""

    def __init__(self, builder, operands, rows, columns, form):
        super().__init__(builder, operands, rows, columns, form)
        lanes = self._lanes
        self._pairs = ir.VectorType(BF16, 2 * lanes)
        self._words = _Array(operands.weights, operands.stride, INT16)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
        kinds = [self._vector, self._pairs, self._pairs]
        self._multiply = declare(builder, name, self._vector, kinds)

    def _add_all(self, registers):
        super()._add_all(registers)
        builder = self._builder
        factor = spread(builder, self._operands.factor, self._lanes)
        for register in registers.values():
            builder.store(builder.fmul(builder.load(register), factor), register)

    def _add_part(self, part, registers):
        builder = self._builder
        with cgutils.for_range(builder, builder.lshr(part.count, INT64(1))) as loop:
            self._add_pair(part, builder.mul(loop.index, INT64(2)), registers, is_whole=True)
        is_odd = builder.trunc(part.count, ir.IntType(1))
        with builder.if_then(is_odd):
            last = builder.sub(part.count, INT64(1))
            self._add_pair(part, last, registers, is_whole=False)

    def _add_pair(self, part, row, registers, *, is_whole):
        """Add the terms of the part's rows `row` and, if the pair `is_whole`, the next one."""
        builder = self._builder
        self._prefetch(part, row, rows=2)
        matrix = []
        for column in self._columns:
            first = self._load_vector(part, row, column)
            second = ir.Constant(first.type, None)
            if is_whole:
                following = builder.add(row, INT64(1))
                second = self._load_vector(part, following, column)
            matrix.append(self._interleaved(first, second))
        number = builder.add(part.first, row)
        weights = [self._load_weight_pair(row, number) for row in self._rows]
        for cell, register in registers.items():
            terms = [builder.load(register), weights[cell.row], matrix[cell.column]]
            builder.store(builder.call(self._multiply, terms), register)

    def _interleaved(self, first, second):
        """Return a number of each vector in turn."""
        builder = self._builder
        lanes = self._lanes
        order = [
            lane
            for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True)
            for lane in pair
        ]
        mask = ir.Constant(ir.VectorType(INT32, 2 * lanes), order)
        return builder.bitcast(builder.shuffle_vector(first, second, mask), self._pairs)

    def _load_weight_pair(self, row, column):
        """Load the weights at [row, column] and behind it into every pair of lanes."""
        builder = self._builder
        place = self._words.pointer(builder, INT64(row), column, INT32)
        pair = builder.load(place, align=2)
        return builder.bitcast(spread(builder, pair, self._lanes), self._pairs)
