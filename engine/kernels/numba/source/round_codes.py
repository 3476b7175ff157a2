"""Rounding of groups of inputs to whole numbers of 8 bits, without their outliers."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import GROUP, LANES
from engine.kernels.numba.source.llvm import (
    FP32,
    INT8,
    INT16,
    INT32,
    INT64,
    declare,
    load,
    offset,
    spread,
    store,
    widen_vector,
)

NUMBERS = ir.VectorType(FP32, LANES)
WHOLE = ir.VectorType(INT32, LANES)
SMALL = ir.VectorType(INT8, LANES)
HALF = ir.VectorType(INT16, LANES)
ZEROS = ir.Constant(NUMBERS, None)


@intrinsic
def add_squares(typing, x, groups):
    """Return the sum of the squares of groups of bf16 at this address, and a poison.

    The poison is NaN if one of them is NaN or infinite, else 0.
    """

    def code(context, builder, signature, arguments):
        address, count = arguments
        fma = declare(builder, f"llvm.fma.v{LANES}f32", NUMBERS, [NUMBERS] * 3)
        squares = cgutils.alloca_once_value(builder, ZEROS)
        poisons = cgutils.alloca_once_value(builder, ZEROS)
        builder.store(ZEROS, squares)
        builder.store(ZEROS, poisons)
        with cgutils.for_range(builder, count) as loop:
            for numbers in _group(builder, address, loop.index):
                so_far = builder.load(squares)
                total = builder.call(fma, [numbers, numbers, so_far])
                builder.store(total, squares)
                so_far = builder.load(poisons)
                poison = builder.call(fma, [numbers, ZEROS, so_far])
                builder.store(poison, poisons)
        found = []
        for place in (squares, poisons):
            lanes = builder.load(place)
            found.append(_sum(builder, lanes))
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.float32, 2)(types.int64, types.int64), code


@intrinsic
def largest_of_groups(typing, x, first, end, limit):
    """Return the largest magnitude in groups of bf16 that is not above `limit`.

    They are the groups [first, end), and at least one.
    """

    def code(context, builder, signature, arguments):
        x, first, end, limit = arguments
        larger = declare(builder, f"llvm.maxnum.v{LANES}f32", NUMBERS, [NUMBERS] * 2)
        reduce = declare(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", FP32, [NUMBERS])
        largest = cgutils.alloca_once_value(builder, ZEROS)
        builder.store(ZEROS, largest)
        with cgutils.for_range(builder, builder.sub(end, first)) as loop:
            halves = _group(builder, x, builder.add(first, loop.index))
            _, kept = _without_outliers(builder, halves, limit)
            both = builder.call(larger, [_abs(builder, half) for half in kept])
            builder.store(builder.call(larger, [both, builder.load(largest)]), largest)
        return builder.call(reduce, [builder.load(largest)])

    return types.float32(types.int64, types.int64, types.int64, types.float32), code


@intrinsic
def round_group(typing, x, codes, group, limit, factor):
    """Round a group of bf16, times `factor`, to int8, and write it to `codes` [groups, 32].

    Those above `limit` are outliers: they become 0. Returns the sum of the codes, and the outliers
    as a set of 32 bits.
    """

    def code(context, builder, signature, arguments):
        x, codes, group, limit, factor = arguments
        halves = _group(builder, x, group)
        large, kept = _without_outliers(builder, halves, limit)
        factors = spread(builder, factor, LANES)
        distance = builder.mul(group, INT64(GROUP))
        begin = builder.add(codes, distance)
        totals = []
        for index, half in enumerate(kept):
            steps = builder.fmul(half, factors)
            whole = _round(builder, steps)
            small = builder.trunc(whole, SMALL)
            place = offset(builder, begin, LANES * index)
            store(builder, small, place, align=1)
            totals.append(whole)
        name = f"llvm.vector.reduce.add.v{LANES}i32"
        reduce = declare(builder, name, INT32, [WHOLE])
        both = builder.add(*totals)
        total = builder.call(reduce, [both])
        found = [total, _bits(builder, large)]
        return context.make_tuple(builder, signature.return_type, found)

    result = types.Tuple((types.int32, types.int64))
    arguments = types.int64, types.int64, types.int64, types.float32, types.float32
    return result(*arguments), code


@intrinsic
def lowest_bit(typing, bits):
    """Return the position of the lowest bit of a number that is not 0."""

    def code(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), code


def _group(builder, address, group):
    """Load a group of bf16 as two vectors of fp32."""
    distance = builder.mul(group, INT64(2 * GROUP))
    begin = builder.add(address, distance)
    halves = []
    for half in range(GROUP // LANES):
        place = offset(builder, begin, 2 * LANES * half)
        bits = load(builder, place, HALF, align=2)
        numbers = widen_vector(builder, bits, LANES)
        halves.append(numbers)
    return halves


def _without_outliers(builder, halves, limit):
    """Return where two vectors are above the limit, and the vectors with zeros there."""
    bound = spread(builder, limit, LANES)
    large = [builder.fcmp_ordered(">", _abs(builder, half), bound) for half in halves]
    kept = [builder.select(mask, ZEROS, half) for mask, half in zip(large, halves, strict=True)]
    return large, kept


def _abs(builder, numbers):
    function = declare(builder, f"llvm.fabs.v{LANES}f32", NUMBERS, [NUMBERS])
    return builder.call(function, [numbers])


def _round(builder, numbers):
    nearest = declare(builder, f"llvm.rint.v{LANES}f32", NUMBERS, [NUMBERS])
    return builder.fptosi(builder.call(nearest, [numbers]), WHOLE)


def _sum(builder, numbers):
    reduce = declare(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", FP32, [FP32, NUMBERS])
    return builder.call(reduce, [FP32(0), numbers], fastmath=("reassoc",))


def _bits(builder, masks):
    """Return two vectors of conditions as a number of 32 bits."""
    sets = [builder.bitcast(mask, ir.IntType(LANES)) for mask in masks]
    low, high = (builder.zext(bits, INT64) for bits in sets)
    shifted = builder.shl(high, INT64(LANES))
    return builder.or_(low, shifted)
