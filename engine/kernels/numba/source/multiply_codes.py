"""Products of a few rows of 15-bit numbers with a panel of 8- or 4-bit weights (AVX512_VNNI).

The instruction multiplies 8-bit numbers. So a row has high and low parts, 128 * high + low. Low
parts are left out where all of a group are 0, which changes no sum.
Sums within a group of inputs are whole numbers, so their order does not matter. The groups are
added in order, in fp32.
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
    typing, codes, scales, bias, groups, x, x_low, x_bytes, x_scales, x_sums, x_is_wide,
    out, out_bytes, rows, bits, offsets, biased, wide,
):  # fmt: skip
    """out[r, :16] = sum over g of x_scales[r, g] * scales[g] * (x[r, g] . codes[g] + x_sums[r, g]).

    With `offsets` it is the sum over g of x_scales[r, g] * scales[g] * (x[r, g] . codes[g]) +
    offsets[g] * x_sums[r, g]. `_Operands` describes the arguments. `out` is fp32 if `wide`, else
    bf16. The last five arguments are literals.
    """
    arguments = (
        codes, scales, bias, groups, x, x_low, x_bytes, x_scales, x_sums, x_is_wide,
        out, out_bytes, rows, bits, offsets, biased, wide,
    )  # fmt: skip
    shape = _Shape(*(each.literal_value for each in arguments[12:]))

    def code(context, builder, signature, values):
        _Panel(builder, _Operands(*values[:12]), shape).multiply()
        return context.get_dummy_value()

    return types.void(*arguments), code


class _Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs."""

    codes: ir.Value  # address of [groups, bytes of a group]
    scales: ir.Value  # address of [groups, 16] fp16, or [groups, 2, 16]: scales, then offsets
    bias: ir.Value  # address of [16] bf16
    groups: ir.Value
    x: ir.Value  # address of [rows, groups, 32] int8: high parts
    x_low: ir.Value  # address of [rows, groups, 32] int8: low parts
    x_bytes: ir.Value
    x_scales: ir.Value  # address of [rows, groups] fp32
    x_sums: ir.Value  # address of [rows, groups] int32, or fp32 with offsets
    x_is_wide: ir.Value  # address of [rows, groups] int32: 0 if all low parts are 0
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
            self._write(row, builder.load(total))

    def _add_group(self, group, totals):
        builder = self._builder
        codes = self._load_codes(group)
        scale, shift = self._load_scales(group)
        for row, total in enumerate(totals):
            place = self._row_place(row, group)
            summed = builder.load(total)
            if self._shape.offsets:
                whole = ir.Constant(WHOLE, None)
                x_sum = self._spread(self._operands.x_sums, place, FP32)
                summed = builder.call(self._fma, [shift, x_sum, summed])
            else:
                whole = self._spread(self._operands.x_sums, place, INT32)
            x = self._inputs_address(self._operands.x, row, group)
            high = self._add_products(ir.Constant(WHOLE, None), codes, x)
            whole = builder.add(whole, builder.shl(high, ir.Constant(WHOLE, [7] * LANES)))
            both = cgutils.alloca_once_value(builder, whole)
            builder.store(whole, both)
            address = builder.add(self._operands.x_is_wide, place)
            is_wide = load(builder, address, INT32, align=4)
            with builder.if_then(cgutils.is_not_null(builder, is_wide)):
                low = self._inputs_address(self._operands.x_low, row, group)
                builder.store(self._add_products(whole, codes, low), both)
            found = builder.sitofp(builder.load(both), SUMS)
            factor = self._spread(self._operands.x_scales, place, FP32)
            factor = builder.fmul(factor, scale)
            builder.store(builder.call(self._fma, [found, factor, summed]), total)

    def _add_products(self, whole, codes, x):
        """Add the products of the codes with 32 inputs at address `x`."""
        builder = self._builder
        for quad, code in enumerate(codes):
            word = load(builder, offset(builder, x, 4 * quad), INT32, align=4)
            inputs = spread(builder, word, LANES)
            whole = builder.call(self._multiply, [whole, code, inputs])
        return whole

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

    def _inputs_address(self, base, row, group):
        builder = self._builder
        begin = self._row_address(base, self._operands.x_bytes, row)
        return builder.add(begin, builder.mul(group, INT64(GROUP)))

    def _row_address(self, base, row_bytes, row):
        return self._builder.add(base, self._builder.mul(row_bytes, INT64(row)))
