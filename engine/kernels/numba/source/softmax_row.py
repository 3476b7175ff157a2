"""The softmax of a row of scores, written out instruction by instruction (AVX512_BF16)."""

from __future__ import annotations

from functools import reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.source.llvm import (
    BF16,
    FP32,
    INT16,
    INT32,
    INT64,
    declare,
    load,
    offset,
    spread,
    store,
)

LANES = 16  # numbers of a vector
VECTORS = 4  # that are taken together, so that none waits for the one before it
STEP = LANES * VECTORS
VECTOR = ir.VectorType(FP32, LANES)
ROUNDED = ir.VectorType(BF16, LANES)
# Of 2**x for x between -1/2 and 1/2: the polynomial of degree 4 with the smallest maximum relative
# error, which is 2.6e-6. The weights are rounded to bf16, whose numbers are 2**-8 apart.
FACTORS = (0.0095701, 0.05591786, 0.24024745, 0.69312181, 0.99999926)
LOWEST = -126.0  # exponent; so a hidden score, -inf, gets a weight that is negligible next to 1


@intrinsic
def softmax_row(typing, address, count, factor):
    """Replace `count` fp32 scores at an address by 2**(factor * (score - top)), in bf16, no gaps.

    `top` is the highest score, and `count` a multiple of STEP. Returns the sum before rounding.
    """

    def code(context, builder, signature, arguments):
        return _Row(builder, *arguments).emit()

    return types.float32(types.int64, types.int64, types.float32), code


class _Row:
    """Code generator of `softmax_row`."""

    def __init__(self, builder, address, count, factor):
        self._builder, self._address, self._count = builder, address, count
        self._factor = spread(builder, factor, LANES)

    def emit(self):
        builder = self._builder
        top = spread(builder, self._highest(), LANES)
        shift = builder.fneg(builder.fmul(top, self._factor))
        sums = [self._register(0.0) for _ in range(VECTORS)]
        with cgutils.for_range_slice(builder, INT64(0), self._count, INT64(STEP)) as (first, _):
            target = builder.add(self._address, builder.mul(first, INT64(2)))
            for vector, scores in enumerate(self._load(first)):
                weights = self._exp2(self._fma(scores, self._factor, shift))
                builder.store(builder.fadd(builder.load(sums[vector]), weights), sums[vector])
                rounded = self._call("llvm.x86.avx512bf16.cvtneps2bf16.512", [weights], ROUNDED)
                store(builder, rounded, offset(builder, target, 2 * LANES * vector), align=2)
        total = reduce(builder.fadd, [builder.load(each) for each in sums])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        lane_sum = declare(builder, name, FP32, [FP32, VECTOR])
        return builder.call(lane_sum, [FP32(0), total], fastmath=("reassoc",))

    def _highest(self):
        """Return the highest score, ignoring NaN."""
        builder = self._builder
        tops = [self._register(float("-inf")) for _ in range(VECTORS)]
        with cgutils.for_range_slice(builder, INT64(0), self._count, INT64(STEP)) as (first, _):
            for top, scores in zip(tops, self._load(first), strict=True):
                builder.store(self._higher(builder.load(top), scores), top)
        lanes = reduce(self._higher, [builder.load(each) for each in tops])
        maximum = declare(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", FP32, [VECTOR])
        return builder.call(maximum, [lanes], fastmath=("nnan",))

    def _higher(self, old, new):
        is_higher = self._builder.fcmp_ordered(">", new, old)  # not if it is NaN
        return self._builder.select(is_higher, new, old)

    def _exp2(self, x):
        """Return 2**x, within 3e-6 of it for LOWEST <= x <= 0."""
        builder = self._builder
        lowest = self._constant(LOWEST)
        x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
        whole = self._call(f"llvm.nearbyint.v{LANES}f32", [x])
        rest = builder.fsub(x, whole)
        first, *others = FACTORS
        y = self._constant(first)
        for factor in others:
            y = self._fma(y, rest, self._constant(factor))
        everywhere, to_nearest = ir.Constant(INT16, -1), INT32(4)  # 4: the current rounding mode
        operands = [y, whole, y, everywhere, to_nearest]
        return self._call("llvm.x86.avx512.mask.scalef.ps.512", operands)

    def _load(self, first):
        builder = self._builder
        begin = builder.add(self._address, builder.mul(first, INT64(4)))
        size = 4 * LANES
        places = [offset(builder, begin, size * vector) for vector in range(VECTORS)]
        return [load(builder, place, VECTOR, align=4) for place in places]

    def _register(self, number):
        return cgutils.alloca_once_value(self._builder, self._constant(number))

    def _constant(self, number):
        return ir.Constant(VECTOR, [number] * LANES)

    def _fma(self, x, factor, term):
        return self._call(f"llvm.fma.v{LANES}f32", [x, factor, term])

    def _call(self, name, operands, result=VECTOR):
        function = declare(self._builder, name, result, [each.type for each in operands])
        return self._builder.call(function, operands)
