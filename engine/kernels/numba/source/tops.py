"""The highest logits of a row's blocks, by integers of the same order."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.intrinsics import array_at
from engine.kernels.numba.source.llvm import INT32

BLOCK = 256  # tokens
INFINITE = 0xFF000001  # the order of +inf


@intrinsic
def order_of(typing, number):
    """Map fp32 to uint32 of the same order: -inf is 0, zeros of both signs are equal.

    Every NaN is above +inf.
    """

    def code(context, builder, signature, arguments):
        zero = ir.Constant(arguments[0].type, 0.0)
        bits = builder.bitcast(builder.fadd(arguments[0], zero), INT32)  # -0.0 becomes 0.0
        flipped = builder.and_(builder.ashr(bits, INT32(31)), INT32(0x7FFFFFFF))
        return builder.sub(builder.xor(bits, flipped), INT32(0x807FFFFF))

    return types.uint32(types.float32), code


@intrinsic
def number_of(typing, order):
    """Return the number of an order. The inverse of `order_of`."""

    def code(context, builder, signature, arguments):
        order = builder.add(arguments[0], INT32(0x807FFFFF))
        flipped = builder.and_(builder.ashr(order, INT32(31)), INT32(0x7FFFFFFF))
        return builder.bitcast(builder.xor(order, flipped), ir.FloatType())

    return types.float32(types.uint32), code


# Loops begin at 0: for any other first index the compiler checks whether it is negative, and does
# not vectorize. A part of a row therefore is an array of its own.


@njit(inline="always")
def floats_at(address, first, count):
    return array_at(address + 4 * first, (count,), np.float32)


@njit(inline="always")
def ids_at(address, first, count):
    return array_at(address + 4 * first, (count,), np.int32)


@njit(fastmath=EXACT, error_model="numpy")
def highest_order(numbers):
    """Return the highest order of some numbers; 0 if there are none."""
    highest = np.uint32(0)
    for i in range(len(numbers)):
        order = order_of(numbers[i])
        highest = order if order > highest else highest
    return highest


@njit(inline="always")
def find_tops(address, size, tops):
    """Store the highest logit of each block, and return the order of the highest of all."""
    highest = np.uint32(0)
    for block in range(len(tops)):
        first = block * BLOCK
        top = highest_order(floats_at(address, first, min(BLOCK, size - first)))
        tops[block] = number_of(top)
        highest = top if top > highest else highest
    return highest


@njit(inline="always")
def first_equal(logits, tops, peak):
    """Return the index of the first logit that equals `peak`, the highest one."""
    block = 0
    while tops[block] != peak:
        block += 1
    token = block * BLOCK
    while logits[token] != peak:
        token += 1
    return token
