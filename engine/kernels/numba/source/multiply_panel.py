"""Products of a few rows with a panel of a bf16 weight, on CPUs that have AVX512_BF16.

The sums stay in registers, and oneDNN's order of summation is written out.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import CACHE_LINE
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

LANES = 16  # outputs of one vector
PREFETCH = 4096  # how many bytes ahead of the only read of a weight it is prefetched
ALL = 0  # cache lines: those of the pair
SUMS = ir.VectorType(FP32, LANES)
PAIRS = ir.VectorType(BF16, 2 * LANES)  # a pair of inputs for each lane
ROUNDED = ir.VectorType(BF16, LANES)


@intrinsic(prefer_literal=True)
def multiply_panel(
    typing, weight, ahead, bias, pairs, split, x, x_bytes, out, out_bytes,
    rows, width, lines, biased, wide,
):  # fmt: skip
    """out[r, :width] = x[r] times a panel [pairs, width, 2] of a weight, plus the bias.

    `out` is fp32 if `wide`, else bf16.
    Pairs of inputs are multiplied and added in order (AVX512_BF16). A new partial sum begins after
    every `split` pairs, and the partial sums are added in order. oneDNN uses the same order.

    For each pair, `lines` cache lines, or ALL, are prefetched from `ahead` bytes behind it on.
    """
    arguments = (
        weight, ahead, bias, pairs, split, x, x_bytes, out, out_bytes,
        rows, width, lines, biased, wide,
    )  # fmt: skip
    num_rows = rows.literal_value
    num_vectors = width.literal_value // LANES

    def code(context, builder, signature, values):
        operands = _Operands(*values[:9])
        flags = lines.literal_value, biased.literal_value, wide.literal_value
        panel = _Panel(builder, operands, num_rows, num_vectors, *flags)
        panel.multiply()
        return context.get_dummy_value()

    return types.void(*arguments), code


class _Operands(NamedTuple):
    """Addresses and numbers that are known only when the kernel runs."""

    weight: ir.Value
    ahead: ir.Value
    bias: ir.Value
    pairs: ir.Value
    split: ir.Value
    x: ir.Value
    x_bytes: ir.Value
    out: ir.Value
    out_bytes: ir.Value


class _RowSums(NamedTuple):
    """Registers with the sums of one row, a vector of outputs each."""

    row: int
    totals: list[ir.Value]  # sums of the finished partial sums
    partials: list[ir.Value]


class _Panel:
    """Code generator of `multiply_panel` for one shape."""

    def __init__(self, builder, operands, rows, vectors, lines, biased, wide):
        self._builder = builder
        self._operands = operands
        self._rows = range(rows)
        self._vectors = range(vectors)
        self._lines = self._vectors if lines == ALL else range(lines)
        self._biased = biased
        self._wide = wide
        extension = "llvm.x86.avx512bf16"
        self._multiply = declare(builder, f"{extension}.dpbf16ps.512", SUMS, [SUMS, PAIRS, PAIRS])
        self._round = declare(builder, f"{extension}.cvtneps2bf16.512", ROUNDED, [SUMS])

    def multiply(self):
        builder = self._builder
        pairs = self._operands.pairs
        split = self._operands.split
        sums = [self._begin(row) for row in self._rows]
        with cgutils.for_range_slice(builder, INT64(0), pairs, split) as (first, _):
            self._add_split(first, sums)
        for each in sums:
            for vector, total in enumerate(each.totals):
                self._write(each.row, vector, builder.load(total))

    def _begin(self, row):
        totals = self._allocate_zeros()
        partials = self._allocate_zeros()
        for total in totals:
            self._builder.store(ir.Constant(SUMS, None), total)
        return _RowSums(row, totals, partials)

    def _allocate_zeros(self):
        zeros = ir.Constant(SUMS, None)
        return [cgutils.alloca_once_value(self._builder, zeros) for _ in self._vectors]

    def _add_split(self, first, sums):
        """Add the partial sums of the pairs from `first` on to the totals."""
        builder = self._builder
        pairs = self._operands.pairs
        for each in sums:
            for partial in each.partials:
                builder.store(ir.Constant(SUMS, None), partial)
        end = builder.add(first, self._operands.split)
        is_whole = builder.icmp_signed("<", end, pairs)
        end = builder.select(is_whole, end, pairs)
        with cgutils.for_range(builder, builder.sub(end, first)) as loop:
            self._add_pair(builder.add(first, loop.index), sums)
        for each in sums:
            for total, partial in zip(each.totals, each.partials, strict=True):
                finished = builder.fadd(builder.load(total), builder.load(partial))
                builder.store(finished, total)

    def _add_pair(self, pair, sums):
        builder = self._builder
        weights = self._load_weights(pair)
        for each in sums:
            inputs = self._load_inputs(each.row, pair)
            for partial, factors in zip(each.partials, weights, strict=True):
                operands = [builder.load(partial), inputs, factors]
                builder.store(builder.call(self._multiply, operands), partial)

    def _load_weights(self, pair):
        """Load a pair of inputs' weights, and prefetch others."""
        builder = self._builder
        size = CACHE_LINE * len(self._vectors)
        begin = builder.add(self._operands.weight, builder.mul(pair, INT64(size)))
        weights = []
        for vector in self._vectors:
            address = offset(builder, begin, CACHE_LINE * vector)
            weights.append(load(builder, address, PAIRS, align=CACHE_LINE))
        later = builder.add(begin, self._operands.ahead)
        for line in self._lines:
            prefetch(builder, offset(builder, later, CACHE_LINE * line), locality=2)
        return weights

    def _load_inputs(self, row, pair):
        """Load a row's pair of inputs into every lane."""
        builder = self._builder
        begin = self._row_address(self._operands.x, self._operands.x_bytes, row)
        address = builder.add(begin, builder.mul(pair, INT64(4)))
        word = load(builder, address, INT32, align=2)
        return builder.bitcast(spread(builder, word, LANES), PAIRS)

    def _write(self, row, vector, total):
        builder = self._builder
        distance = 2 * LANES * vector
        if self._biased:
            address = offset(builder, self._operands.bias, distance)
            bits = load(builder, address, ir.VectorType(INT16, LANES), align=2)
            total = builder.fadd(total, widen_vector(builder, bits, LANES))
        begin = self._row_address(self._operands.out, self._operands.out_bytes, row)
        if self._wide:
            store(builder, total, offset(builder, begin, 2 * distance), align=4)
        else:
            rounded = builder.call(self._round, [total])
            store(builder, rounded, offset(builder, begin, distance), align=2)

    def _row_address(self, base, row_bytes, row):
        distance = self._builder.mul(row_bytes, INT64(row))
        return self._builder.add(base, distance)
