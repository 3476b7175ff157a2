"""LLVM instructions that kernels need and that Numba's Python cannot express.

Sums are written out and not left to LLVM's vectorizer. They stay in registers, and their order is
the same in every kernel.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

# A tile of sums is kept in registers. AVX-512 has 32 registers of 16 fp32, older CPUs 16 of 8.
FEATURES = config.CPU_FEATURES or binding.get_host_cpu_features().flatten()
AVX512 = "+avx512f" in FEATURES.split(",")
LANES, ROWS, COLUMNS = (16, 4, 4) if AVX512 else (8, 4, 2)
AVX512_BF16 = "+avx512bf16" in FEATURES.split(",")
PREFETCH = 4096  # how many bytes ahead of the current read a weight is prefetched
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FP32 = ir.FloatType()
CACHE_LINE = 64


@intrinsic
def at(typing, address):
    """Convert the address to a pointer."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def take(typing, counter):
    """Return the number at this address and increment it atomically, across all threads."""

    def code(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", place, INT64(1), "monotonic")

    return types.int64(types.int64), code


@intrinsic
def to_fp32(typing, element):
    """Convert an array element, which is fp32 or the bits of bf16, to fp32."""

    def code(context, builder, signature, arguments):
        return arguments[0] if isinstance(element, types.Float) else _wide(builder, *arguments)

    return types.float32(element), code


def _wide(builder, bits, lanes=None):
    """Convert bf16 to fp32: a single number, or a vector of `lanes` numbers."""
    words = ir.VectorType(INT32, lanes) if lanes else INT32
    numbers = ir.VectorType(FP32, lanes) if lanes else FP32
    shift = ir.Constant(words, [16] * lanes if lanes else 16)
    return builder.bitcast(builder.shl(builder.zext(bits, words), shift), numbers)


@intrinsic
def to_element(typing, number, array):
    """Convert the fp32 number to the array's type; bf16 rounds to nearest, ties to even."""

    def code(context, builder, signature, arguments):
        if isinstance(array.dtype, types.Float):
            return arguments[0]
        bits = builder.bitcast(arguments[0], INT32)
        odd = builder.and_(builder.lshr(bits, INT32(16)), INT32(1))
        rounded = builder.add(bits, builder.add(odd, INT32(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, INT32(16)), INT16)

    return array.dtype(types.float32, array), code


@intrinsic(prefer_literal=True)
def highest(typing, numbers, count):
    """Return the highest of `count` fp32 numbers at this address, ignoring NaN."""
    return types.float32(numbers, count), _reduction("fmax", count.literal_value)


@intrinsic(prefer_literal=True)
def total(typing, numbers, count):
    """Return the pairwise sum of `count` fp32 numbers at this address."""
    return types.float32(numbers, count), _reduction("fadd", count.literal_value)


def _reduction(operation, count):
    vector, adds = ir.VectorType(FP32, count), operation == "fadd"

    def code(context, builder, signature, arguments):
        name = f"llvm.vector.reduce.{operation}.v{count}f32"
        reduce = _instruction(builder, name, FP32, [FP32, vector] if adds else [vector])
        read = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=4)
        if adds:  # pairwise, not in the order of the numbers
            return builder.call(reduce, [FP32(0), read], fastmath=("reassoc",))
        return builder.call(reduce, [read])

    return code


@intrinsic(prefer_literal=True)
def sum_rows(typing, out, keep, weights, stride, matrix, ahead, count, rows, width, half):
    """out[r] = keep[r] * out[r] + weights[r, 0] * matrix[0] + weights[r, 1] * matrix[1] + ...

    The terms are added in this order. Arguments are the addresses of out [rows, width], keep [rows]
    and weights [rows, stride] in fp32, and of matrix [count, width], which is bf16 if `half`. If
    `keep` is a literal 0, the old `out` is ignored. `count` rows at the address `ahead` are
    prefetched meanwhile.
    """
    shape = rows.literal_value, width.literal_value, half.literal_value
    arguments = out, keep, weights, stride, matrix, ahead, count, rows, width, half

    def code(context, builder, signature, values):
        sums = _Sums(builder, values, *shape, fresh=isinstance(keep, types.IntegerLiteral))
        for top in range(0, shape[0], ROWS):
            for left in range(0, shape[1], COLUMNS * sums.lanes):
                sums.tile(top, left)
        return context.get_dummy_value()

    return types.void(*arguments), code


class _Sums:
    """Code generator of `sum_rows` for one shape."""

    def __init__(self, builder, values, rows, width, half, *, fresh):
        self._out, self._keep, self._weights, self._stride, self._matrix = values[:5]
        self._ahead, self._count = values[5:7]
        self._builder, self._fresh, self._half = builder, fresh, half
        self._rows, self._width = rows, width
        self.lanes = LANES if width % LANES == 0 else 8
        self._vector = ir.VectorType(FP32, self.lanes)
        fma = f"llvm.fma.v{self.lanes}f32"
        self._fma = _instruction(builder, fma, self._vector, [self._vector] * 3)

    def tile(self, top, left):
        """Emit the sums of a few rows and columns over the whole matrix."""
        b = self._builder
        rows = [INT64(r) for r in range(top, min(self._rows, top + ROWS))]
        end = min(self._width, left + COLUMNS * self.lanes)
        columns = [INT64(c) for c in range(left, end, self.lanes)]
        tile = [(r, c) for r in rows for c in columns]
        places = [self._place(self._out, FP32, r, self._width, c, self._vector) for r, c in tile]
        starts = [self._start(r, place) for (r, _), place in zip(tile, places, strict=True)]
        sums = [cgutils.alloca_once_value(b, start) for start in starts]
        with cgutils.for_range(b, self._count) as loop:
            if top == left == 0:
                self._prefetch(loop.index)
            matrix = {c: self._matrix_row(loop.index, c) for c in columns}
            weights = {r: self._spread(self._weights, r, self._stride, loop.index) for r in rows}
            for (r, c), total in zip(tile, sums, strict=True):
                b.store(b.call(self._fma, [weights[r], matrix[c], b.load(total)]), total)
        for place, total in zip(places, sums, strict=True):
            b.store(b.load(total), place, align=4)

    def _start(self, row, place):
        if self._fresh:
            return ir.Constant(self._vector, None)  # zeros
        keep = self._spread(self._keep, row, INT64(1), INT64(0))
        return self._builder.fmul(self._builder.load(place, align=4), keep)

    def _matrix_row(self, row, column):
        """Load one vector of the matrix as fp32."""
        b = self._builder
        if not self._half:
            return b.load(
                self._place(self._matrix, FP32, row, self._width, column, self._vector), align=4
            )
        bits = ir.VectorType(INT16, self.lanes)
        place = self._place(self._matrix, INT16, row, self._width, column, bits)
        return _wide(b, b.load(place, align=2), self.lanes)

    def _spread(self, base, row, stride, column):
        """Load the fp32 number at [row, column] into every lane."""
        b = self._builder
        number = b.load(self._place(base, FP32, row, stride, column, FP32), align=4)
        nothing = ir.Constant(self._vector, ir.Undefined)
        first = ir.Constant(ir.VectorType(INT32, self.lanes), None)  # every lane takes lane 0
        return b.shuffle_vector(b.insert_element(nothing, number, INT32(0)), nothing, first)

    def _prefetch(self, row):
        prefetch = _prefetch(self._builder)
        element = INT16 if self._half else FP32
        size = _bytes(element)
        for column in range(0, self._width, CACHE_LINE // size):
            place = self._place(self._ahead, element, row, self._width, INT64(column), INT8)
            read, nearest, data = INT32(0), INT32(3), INT32(1)
            self._builder.call(prefetch, [place, read, nearest, data])

    def _place(self, base, element, row, stride, column, kind):
        """Return a pointer of type `kind` to [row, column] of the elements at address `base`."""
        b = self._builder
        stride = INT64(stride) if isinstance(stride, int) else stride
        number = b.add(b.mul(row, stride), column)
        return b.inttoptr(b.add(base, b.mul(number, INT64(_bytes(element)))), kind.as_pointer())


class _BF16(ir.Type):
    """LLVM's bfloat, for which llvmlite has no type."""

    def _to_string(self):
        return "bfloat"


BF16 = _BF16()  # one instance, because llvmlite compares types


@intrinsic(prefer_literal=True)
def multiply_panel(
    typing, weight, bias, pairs, split, x, x_bytes, out, out_bytes, rows, width, biased
):
    """out[r, :width] = x[r] times a panel [pairs, width, 2] of a weight, plus the bias, in bf16.

    Pairs of inputs are multiplied and added in order (AVX512_BF16). A new partial sum begins after
    every `split` pairs, and the partial sums are added in order. oneDNN uses the same order.
    """
    arguments = weight, bias, pairs, split, x, x_bytes, out, out_bytes, rows, width, biased
    shape = rows.literal_value, width.literal_value, biased.literal_value

    def code(context, builder, signature, values):
        _Panel(builder, values, *shape).multiply()
        return context.get_dummy_value()

    return types.void(*arguments), code


class _Panel:
    """Code generator of `multiply_panel` for one shape."""

    def __init__(self, builder, values, rows, width, biased):
        self._weight, self._bias, self._pairs, self._split = values[:4]
        self._x, self._x_bytes, self._out, self._out_bytes = values[4:8]
        self._builder, self._biased, self._rows = builder, biased, rows
        self._columns = range(width // 16)
        self._sum, self._words = ir.VectorType(FP32, 16), ir.VectorType(INT32, 16)
        self._pair = ir.VectorType(BF16, 32)
        self._rounded = ir.VectorType(BF16, 16)
        of = "llvm.x86.avx512bf16.{}.512"
        self._multiply = _instruction(
            builder, of.format("dpbf16ps"), self._sum, [self._sum, self._pair, self._pair]
        )
        self._round = _instruction(builder, of.format("cvtneps2bf16"), self._rounded, [self._sum])

    def multiply(self):
        b, zeros = self._builder, ir.Constant(self._sum, None)
        tile = [(row, column) for row in range(self._rows) for column in self._columns]
        totals = {at: cgutils.alloca_once_value(b, zeros) for at in tile}
        sums = {at: cgutils.alloca_once_value(b, zeros) for at in tile}
        for place in totals.values():
            b.store(zeros, place)
        with cgutils.for_range_slice(b, INT64(0), self._pairs, self._split) as (first, _):
            for place in sums.values():
                b.store(zeros, place)
            end = b.add(first, self._split)
            end = b.select(b.icmp_signed("<", end, self._pairs), end, self._pairs)
            with cgutils.for_range(b, b.sub(end, first)) as loop:
                self._add_pair(b.add(first, loop.index), sums)
            for at in tile:
                b.store(b.fadd(b.load(totals[at]), b.load(sums[at])), totals[at])
        for (row, column), total in totals.items():
            self._write(row, column, b.load(total))

    def _add_pair(self, pair, sums):
        b, size = self._builder, CACHE_LINE * len(self._columns)
        here = b.add(self._weight, b.mul(pair, INT64(size)))
        prefetch = _prefetch(b)
        weights = []
        for column in self._columns:
            place = b.add(here, INT64(CACHE_LINE * column))
            weights.append(b.load(b.inttoptr(place, self._pair.as_pointer()), align=CACHE_LINE))
            ahead = b.inttoptr(b.add(place, INT64(PREFETCH)), cgutils.voidptr_t)
            b.call(prefetch, [ahead, INT32(0), INT32(2), INT32(1)])
        for row in range(self._rows):
            inputs = self._spread(row, pair)
            for column in self._columns:
                place = sums[row, column]
                b.store(b.call(self._multiply, [b.load(place), inputs, weights[column]]), place)

    def _spread(self, row, pair):
        """Load a row's pair of inputs into every lane."""
        b = self._builder
        place = b.add(b.add(self._x, b.mul(self._x_bytes, INT64(row))), b.mul(pair, INT64(4)))
        word = b.load(b.inttoptr(place, INT32.as_pointer()), align=2)
        nothing = ir.Constant(self._words, ir.Undefined)
        first = ir.Constant(self._words, None)
        words = b.shuffle_vector(b.insert_element(nothing, word, INT32(0)), nothing, first)
        return b.bitcast(words, self._pair)

    def _write(self, row, column, total):
        b, size = self._builder, 32 * column
        if self._biased:
            bits = ir.VectorType(INT16, 16)
            place = b.inttoptr(b.add(self._bias, INT64(size)), bits.as_pointer())
            total = b.fadd(total, _wide(b, b.load(place, align=2), 16))
        place = b.add(b.add(self._out, b.mul(self._out_bytes, INT64(row))), INT64(size))
        place = b.inttoptr(place, self._rounded.as_pointer())
        b.store(b.call(self._round, [total]), place, align=2)


def _prefetch(builder):
    return _instruction(
        builder, "llvm.prefetch.p0", ir.VoidType(), [cgutils.voidptr_t, *[INT32] * 3]
    )


def _bytes(element):
    return 4 if element is FP32 else element.width // 8


def _instruction(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
