"""Products of a few rows of 8-bit numbers with a panel of 8- or 4-bit weights (AVX512_VNNI).

Sums within a group of inputs are whole numbers, so their order does not matter. The groups of a
span are added in order, in fp32, and then the spans. The products of a row's outliers follow, also
in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import CACHE_LINE, GROUP, LANES, OUTLIER, SPAN
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

MOST_ROWS = 8  # that are multiplied at once; their sums and a group's codes fill the registers
# How many bytes ahead of the current read a weight is prefetched. With more on their way, few rows
# were measured to read memory slower, and more rows to read it faster.
PREFETCH_FEW, PREFETCH_MORE = 2048, 8192
FEW_ROWS = {8: 2, 4: 1}  # by bits
FIELDS = {name: field[1] for name, field in (OUTLIER.fields or {}).items()}  # distances in bytes
WHOLE = ir.VectorType(INT32, LANES)
SUMS = ir.VectorType(FP32, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
ROUNDED = ir.VectorType(BF16, LANES)


@intrinsic(prefer_literal=True)
def multiply_codes(
    typing, codes, scales, bias, groups, x, x_bytes, x_scales, spans, x_sums, num_outliers,
    outliers, most_outliers, out, out_bytes, rows, bits, offsets, biased, wide,
):  # fmt: skip
    """out[r, :16] = sum over g of factor[r, g] * (x[r, g] . codes[g] + x_sums[r, g]).

    factor[r, g] is x_scales[r, g / 4] * scales[g]. With `offsets` it is the sum over g of
    factor[r, g] * (x[r, g] . codes[g]) + offsets[g] * x_sums[r, g]. The products of outliers are
    added, without offsets, which the sums have already. `_Operands` describes the
    arguments. `rows` are 1 to MOST_ROWS. `out` is fp32 if `wide`, else bf16. The last four
    arguments are literals.
    """
    arguments = (
        codes, scales, bias, groups, x, x_bytes, x_scales, spans, x_sums, num_outliers, outliers,
        most_outliers, out, out_bytes, rows, bits, offsets, biased, wide,
    )  # fmt: skip
    shape = _Shape(*(each.literal_value for each in arguments[-4:]))

    def code(context, builder, signature, values):
        operands = _Operands(*values[:-5])
        end = builder.append_basic_block("multiplied")
        switch = builder.switch(values[-5], end)
        for rows in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"rows_{rows}")
            switch.add_case(INT64(rows), block)
            builder.position_at_end(block)
            _Panel(builder, operands, rows, shape).multiply()
            builder.branch(end)
        builder.position_at_end(end)
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
    x_scales: ir.Value  # address of [rows, spans] fp32
    spans: ir.Value
    x_sums: ir.Value  # address of [rows, groups] int32, or fp32 with offsets
    num_outliers: ir.Value  # address of [rows] int32
    outliers: ir.Value  # address of [rows, most_outliers] OUTLIER
    most_outliers: ir.Value
    out: ir.Value
    out_bytes: ir.Value


class _Shape(NamedTuple):
    """Sizes that are known when the kernel is compiled."""

    bits: int
    offsets: bool
    biased: bool
    wide: bool


class _Panel:
    """Code generator of `multiply_codes` for one number of rows and one shape."""

    def __init__(self, builder, operands, rows, shape):
        self._builder = builder
        self._operands = operands
        self._rows = rows
        self._shape = shape
        self._group_bytes = LANES * GROUP * shape.bits // 8
        self._scale_bytes = (4 if shape.offsets else 2) * LANES
        self._multiply = declare(
            builder, "llvm.x86.avx512.vpdpbusd.512", WHOLE, [WHOLE, WHOLE, WHOLE]
        )
        self._fma = declare(builder, "llvm.fma.v16f32", SUMS, [SUMS] * 3)
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        self._round = None if shape.wide else declare(builder, name, ROUNDED, [SUMS])

    def multiply(self):
        totals = self._zeros()
        with cgutils.for_range(self._builder, self._operands.spans) as loop:
            self._add_span(loop.index, totals)
        self._finish(totals)

    def _zeros(self):
        """Return a variable for each row, which is 0 from here on."""
        builder = self._builder
        zeros = ir.Constant(SUMS, None)
        variables = [cgutils.alloca_once(builder, SUMS) for _ in range(self._rows)]
        for variable in variables:
            builder.store(zeros, variable)
        return variables

    def _add_span(self, span, totals):
        """Add the groups that share a scale of the inputs."""
        builder, operands = self._builder, self._operands
        parts = self._zeros()
        first = builder.mul(span, INT64(SPAN))
        left = builder.sub(operands.groups, first)
        is_whole = builder.icmp_signed(">", left, INT64(SPAN))
        count = builder.select(is_whole, INT64(SPAN), left)
        with cgutils.for_range(builder, count) as loop:
            self._add_group(builder.add(first, loop.index), parts, totals)
        for row, (part, total) in enumerate(zip(parts, totals, strict=True)):
            place = self._row_place(row, operands.spans, span)
            self._add(total, builder.load(part), self._spread(operands.x_scales, place, FP32))

    def _add_group(self, group, parts, totals):
        """Add products of a group's codes to the parts of a span, and of its offsets to totals."""
        builder, operands = self._builder, self._operands
        codes = self._load_codes(group)
        scale, shift = self._load_scales(builder.mul(group, INT64(self._scale_bytes)))
        for row, (part, total) in enumerate(zip(parts, totals, strict=True)):
            place = self._row_place(row, operands.groups, group)
            if shift is not None:
                whole = ir.Constant(WHOLE, None)
                self._add(total, shift, self._spread(operands.x_sums, place, FP32))
            else:
                whole = self._spread(operands.x_sums, place, INT32)
            x = self._inputs_address(row, group)
            for quad, code in enumerate(codes):
                word = load(builder, offset(builder, x, 4 * quad), INT32, align=4)
                whole = builder.call(self._multiply, [whole, code, spread(builder, word, LANES)])
            self._add(part, builder.sitofp(whole, SUMS), scale)

    def _add(self, total, left, right):
        """Add a product of two vectors to a variable."""
        builder = self._builder
        builder.store(builder.call(self._fma, [left, right, builder.load(total)]), total)

    def _finish(self, totals):
        """Add the outliers of each row and write its sums: a loop, to have less code to compile."""
        builder = self._builder
        sums = cgutils.alloca_once(builder, SUMS, size=self._rows)
        for row, total in enumerate(totals):
            builder.store(builder.load(total), builder.gep(sums, [INT64(row)]))
        total = cgutils.alloca_once(builder, SUMS)
        with cgutils.for_range(builder, INT64(self._rows)) as loop:
            row = loop.index
            builder.store(builder.load(builder.gep(sums, [row])), total)
            self._add_outliers(row, total)
            self._write(row, builder.load(total))

    def _add_outliers(self, row, total):
        """Add the products of a row's outliers, in order; offsets are in the groups' sums."""
        builder, operands = self._builder, self._operands
        count_place = builder.add(operands.num_outliers, builder.mul(row, INT64(4)))
        count = builder.zext(load(builder, count_place, INT32, align=4), INT64)
        size = OUTLIER.itemsize
        before = builder.mul(builder.mul(operands.most_outliers, row), INT64(size))
        begin = builder.add(operands.outliers, before)
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(begin, builder.mul(loop.index, INT64(size)))
            codes, scale = self._column(place)
            number = self._outlier_field(place, "number", FP32)
            self._add(total, codes, builder.fmul(spread(builder, number, LANES), scale))

    def _column(self, place):
        """Return the codes of an outlier's weights as fp32, without those of 0, and the scales."""
        builder, bits = self._builder, self._shape.bits
        line, shift, scales = (
            self._outlier_field(place, name, INT32) for name in ("codes", "shift", "scales")
        )
        address = builder.add(self._operands.codes, builder.zext(line, INT64))
        codes = load(builder, address, WHOLE, align=CACHE_LINE)
        mask = ir.Constant(WHOLE, [(1 << bits) - 1] * LANES)
        codes = builder.and_(builder.lshr(codes, spread(builder, shift, LANES)), mask)
        if not self._shape.offsets:
            codes = builder.sub(codes, ir.Constant(WHOLE, [1 << bits - 1] * LANES))
        scale, _ = self._load_scales(builder.zext(scales, INT64))
        return builder.sitofp(codes, SUMS), scale

    def _outlier_field(self, place, name, kind):
        address = offset(self._builder, place, FIELDS[name])
        return load(self._builder, address, kind, align=4)

    def _load_codes(self, group):
        """Return a vector for each quad of inputs, with four unsigned codes in each lane."""
        builder = self._builder
        before = builder.mul(group, INT64(self._group_bytes))
        begin = builder.add(self._operands.codes, before)
        distance = PREFETCH_FEW if self._rows <= FEW_ROWS[self._shape.bits] else PREFETCH_MORE
        vectors = []
        for line in range(self._group_bytes // CACHE_LINE):
            address = offset(builder, begin, CACHE_LINE * line)
            vectors.append(load(builder, address, WHOLE, align=CACHE_LINE))
            prefetch(builder, offset(builder, address, distance), locality=2)
        if self._shape.bits == 8:
            return vectors
        mask = ir.Constant(WHOLE, [0x0F0F0F0F] * LANES)
        four = ir.Constant(WHOLE, [4] * LANES)
        unpacked = []
        for vector in vectors:
            unpacked.append(builder.and_(vector, mask))
            unpacked.append(builder.and_(builder.lshr(vector, four), mask))
        return unpacked

    def _load_scales(self, distance):
        """Return the scales and offsets (None without) at a byte, a vector of fp32 each."""
        builder = self._builder
        address = builder.add(self._operands.scales, distance)
        scale = builder.fpext(load(builder, address, HALVES, align=2), SUMS)
        if not self._shape.offsets:
            return scale, None
        shift = load(builder, offset(builder, address, 2 * LANES), HALVES, align=2)
        return scale, builder.fpext(shift, SUMS)

    def _row_place(self, row, size, index):
        """Return the distance in bytes of a number in [rows, size] of 4 bytes."""
        builder = self._builder
        index = builder.add(builder.mul(size, INT64(row)), index)
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
        begin = self._row_address(self._operands.x, self._operands.x_bytes, INT64(row))
        return builder.add(begin, builder.mul(group, INT64(GROUP)))

    def _row_address(self, base, row_bytes, row):
        return self._builder.add(base, self._builder.mul(row_bytes, row))
