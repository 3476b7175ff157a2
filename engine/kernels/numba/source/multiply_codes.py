"""Products of a few rows of 8-bit numbers with a panel of 8- or 4-bit weights (AVX512_VNNI).

Sums within a group of inputs are whole numbers, so their order does not matter. The groups are
added in order, in fp32. The products of a row's outliers follow, also in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import CACHE_LINE, GROUP, LANES
from engine.kernels.numba.source.llvm import (
    BF16,
    FP32,
    INT16,
    INT32,
    INT64,
    declare,
    load,
    offset,
    prefetch,
    spread,
    store,
    widen_vector,
)

QUADS = GROUP // 4  # of inputs; a lane multiplies four at a time
PREFETCH = 4096  # how many bytes ahead of the current read a weight is prefetched
WHOLE = ir.VectorType(INT32, LANES)
SUMS = ir.VectorType(FP32, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
ROUNDED = ir.VectorType(BF16, LANES)


@intrinsic(prefer_literal=True)
def multiply_codes(
    typing, codes, scales, bias, groups, x, x_bytes, x_scales, x_sums, num_outliers, outliers,
    outlier_numbers, most_outliers, out, out_bytes, rows, bits, offsets, biased, wide,
):  # fmt: skip
    """out[r, :16] = sum over g of x_scales[r, g] * scales[g] * (x[r, g] . codes[g] + x_sums[r, g]).

    With `offsets` it is the sum over g of x_scales[r, g] * scales[g] * (x[r, g] . codes[g]) +
    offsets[g] * x_sums[r, g]. The products of outliers are added. `_Operands` describes the
    arguments. `out` is fp32 if `wide`, else bf16. The last five arguments are literals.
    """
    arguments = (
        codes, scales, bias, groups, x, x_bytes, x_scales, x_sums, num_outliers, outliers,
        outlier_numbers, most_outliers, out, out_bytes, rows, bits, offsets, biased, wide,
    )  # fmt: skip
    shape = _Shape(*(each.literal_value for each in arguments[-5:]))

    def code(context, builder, signature, values):
        _Panel(builder, _Operands(*values[:-5]), shape).multiply()
        return context.get_dummy_value()

    return types.void(*arguments), code


class _Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs."""

    codes: ir.Value  # address of [groups, bytes of a group]
    scales: ir.Value  # address of [groups, 16] fp16, or [groups, 2, 16]: scales, then offsets
    bias: ir.Value  # address of [16] bf16
    groups: ir.Value
    x: ir.Value  # address of [rows, groups, 32] int8
    x_bytes: ir.Value
    x_scales: ir.Value  # address of [rows, groups] fp32
    x_sums: ir.Value  # address of [rows, groups] int32, or fp32 with offsets
    num_outliers: ir.Value  # address of [rows] int32
    outliers: ir.Value  # address of [rows, most_outliers] int32: indices of inputs
    outlier_numbers: ir.Value  # address of [rows, most_outliers] fp32
    most_outliers: ir.Value
    out: ir.Value
    out_bytes: ir.Value


class _Shape(NamedTuple):
    """Sizes that are known when the kernel is compiled."""

    rows: int
    bits: int
    offsets: bool
    biased: bool
    wide: bool


class _Panel:
    """Code generator of `multiply_codes` for one shape."""

    def __init__(self, builder, operands, shape):
        self._builder = builder
        self._operands = operands
        self._shape = shape
        self._group_bytes = LANES * GROUP * shape.bits // 8
        self._multiply = declare(
            builder, "llvm.x86.avx512.vpdpbusd.512", WHOLE, [WHOLE, WHOLE, WHOLE]
        )
        self._fma = declare(builder, "llvm.fma.v16f32", SUMS, [SUMS] * 3)
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        self._round = None if shape.wide else declare(builder, name, ROUNDED, [SUMS])

    def multiply(self):
        builder = self._builder
        zeros = ir.Constant(SUMS, None)
        totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(self._shape.rows)]
        for total in totals:
            builder.store(zeros, total)
        with cgutils.for_range(builder, self._operands.groups) as loop:
            self._add_group(loop.index, totals)
        for row, total in enumerate(totals):
            self._add_outliers(row, total)
            self._write(row, builder.load(total))

    def _add_group(self, group, totals):
        builder = self._builder
        codes = self._load_codes(group)
        scale, shift = self._load_scales(group)
        for row, total in enumerate(totals):
            place = self._row_place(row, group)
            summed = builder.load(total)
            if shift is not None:
                whole = ir.Constant(WHOLE, None)
                x_sum = self._spread(self._operands.x_sums, place, FP32)
                summed = builder.call(self._fma, [shift, x_sum, summed])
            else:
                whole = self._spread(self._operands.x_sums, place, INT32)
            x = self._inputs_address(row, group)
            for quad, code in enumerate(codes):
                word = load(builder, offset(builder, x, 4 * quad), INT32, align=4)
                whole = builder.call(self._multiply, [whole, code, spread(builder, word, LANES)])
            factor = self._spread(self._operands.x_scales, place, FP32)
            factor = builder.fmul(factor, scale)
            found = builder.sitofp(whole, SUMS)
            builder.store(builder.call(self._fma, [found, factor, summed]), total)

    def _add_outliers(self, row, total):
        """Add the products of a row's outliers, in order."""
        builder, operands = self._builder, self._operands
        count_place = offset(builder, operands.num_outliers, 4 * row)
        count = builder.zext(load(builder, count_place, INT32, align=4), INT64)
        begin = builder.mul(operands.most_outliers, INT64(4 * row))
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(begin, builder.mul(loop.index, INT64(4)))
            index = load(builder, builder.add(operands.outliers, place), INT32, align=4)
            weight = self._column(builder.zext(index, INT64))
            number = self._spread(operands.outlier_numbers, place, FP32)
            added = builder.call(self._fma, [weight, number, builder.load(total)])
            builder.store(added, total)

    def _column(self, index):
        """Return the weights of one input, as a vector of fp32."""
        builder, bits = self._builder, self._shape.bits
        # A cache line has the codes of 4 inputs; of 4 bits, those of the next 4 in the high halves.
        per_line = 32 // bits
        line = builder.mul(builder.udiv(index, INT64(per_line)), INT64(CACHE_LINE))
        codes = load(builder, builder.add(self._operands.codes, line), WHOLE, align=CACHE_LINE)
        shift = builder.mul(builder.and_(index, INT64(3)), INT64(8))
        if bits == 4:
            high = builder.and_(index, INT64(4))
            shift = builder.add(shift, high)
        shifts = spread(builder, builder.trunc(shift, INT32), LANES)
        mask = ir.Constant(WHOLE, [(1 << bits) - 1] * LANES)
        codes = builder.and_(builder.lshr(codes, shifts), mask)
        scale, low = self._load_scales(builder.udiv(index, INT64(GROUP)))
        if low is not None:
            return builder.call(self._fma, [builder.sitofp(codes, SUMS), scale, low])
        zero = ir.Constant(WHOLE, [1 << bits - 1] * LANES)
        return builder.fmul(builder.sitofp(builder.sub(codes, zero), SUMS), scale)

    def _load_codes(self, group):
        """Return a vector for each quad of inputs, with four unsigned codes in each lane."""
        builder = self._builder
        distance = builder.mul(group, INT64(self._group_bytes))
        begin = builder.add(self._operands.codes, distance)
        vectors = []
        for line in range(self._group_bytes // CACHE_LINE):
            address = offset(builder, begin, CACHE_LINE * line)
            vectors.append(load(builder, address, WHOLE, align=CACHE_LINE))
            ahead = builder.inttoptr(offset(builder, address, PREFETCH), cgutils.voidptr_t)
            prefetch(builder, ahead, locality=2)
        if self._shape.bits == 8:
            return vectors
        mask = ir.Constant(WHOLE, [0x0F0F0F0F] * LANES)
        four = ir.Constant(WHOLE, [4] * LANES)
        unpacked = []
        for vector in vectors:
            unpacked.append(builder.and_(vector, mask))
            unpacked.append(builder.and_(builder.lshr(vector, four), mask))
        return unpacked

    def _load_scales(self, group):
        """Return a group's scales and offsets (None without), a vector of fp32 each."""
        builder = self._builder
        size = 2 * LANES
        distance = builder.mul(group, INT64(2 * size if self._shape.offsets else size))
        address = builder.add(self._operands.scales, distance)
        scale = builder.fpext(load(builder, address, HALVES, align=2), SUMS)
        if not self._shape.offsets:
            return scale, None
        shift = load(builder, offset(builder, address, size), HALVES, align=2)
        return scale, builder.fpext(shift, SUMS)

    def _row_place(self, row, group):
        """Return the distance in bytes of a row's group in x_scales and x_sums."""
        builder = self._builder
        index = builder.add(builder.mul(self._operands.groups, INT64(row)), group)
        return builder.mul(index, INT64(4))

    def _spread(self, base, place, kind):
        builder = self._builder
        number = load(builder, builder.add(base, place), kind, align=4)
        return spread(builder, number, LANES)

    def _write(self, row, total):
        builder = self._builder
        if self._shape.biased:
            bits = load(builder, self._operands.bias, ir.VectorType(INT16, LANES), align=2)
            total = builder.fadd(total, widen_vector(builder, bits, LANES))
        address = self._row_address(self._operands.out, self._operands.out_bytes, row)
        if self._shape.wide:
            store(builder, total, address, align=4)
        else:
            store(builder, builder.call(self._round, [total]), address, align=2)

    def _inputs_address(self, row, group):
        builder = self._builder
        begin = self._row_address(self._operands.x, self._operands.x_bytes, row)
        return builder.add(begin, builder.mul(group, INT64(GROUP)))

    def _row_address(self, base, row_bytes, row):
        return self._builder.add(base, self._builder.mul(row_bytes, INT64(row)))
