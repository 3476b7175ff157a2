"""Instructions on single values that kernels need and that Numba's Python cannot express."""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.numba.call import CACHE_LINE
from engine.kernels.numba.source.llvm import (
    FP32,
    INT16,
    INT32,
    INT64,
    declare,
    widen,
)


@intrinsic
def at(typing, address):
    """Convert the address to a pointer."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@njit(inline="always")
def array_at(address, shape, kind):
    """Return the array at this address; the size of its first dimension does not matter."""
    return carray(at(address), shape, kind)


@intrinsic(prefer_literal=True)
def on_stack(typing, count):
    """Return the address of room for `count` fp32 numbers, which ends with the kernel's call."""
    size = count.literal_value

    def code(context, builder, signature, arguments):
        room = cgutils.alloca_once(builder, ir.ArrayType(FP32, size))
        room.align = CACHE_LINE
        return builder.ptrtoint(room, INT64)

    return types.int64(count), code


@intrinsic
def take(typing, counter):
    """Return the number at this address and increment it atomically, across all threads.

    A thread's earlier writes are visible to those that see the new number.
    """

    def code(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", place, INT64(1), "acq_rel")

    return types.int64(types.int64), code


@intrinsic
def to_fp32(typing, element):
    """Convert an array element, which is fp32 or the bits of bf16, to fp32."""
    is_fp32 = isinstance(element, types.Float)

    def code(context, builder, signature, arguments):
        (number,) = arguments
        return number if is_fp32 else widen(builder, number)

    return types.float32(element), code


@intrinsic
def to_element(typing, number, array):
    """Convert the fp32 number to the array's type; bf16 rounds to nearest, ties to even."""
    is_fp32 = isinstance(array.dtype, types.Float)

    def code(context, builder, signature, arguments):
        number = arguments[0]
        return number if is_fp32 else _round_to_bf16(builder, number)

    return array.dtype(types.float32, array), code


@intrinsic
def bits_of(typing, number):
    """Return the bits of a fp32 number as int32."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], INT32)

    return types.int32(number), code


def _round_to_bf16(builder, number):
    bits = builder.bitcast(number, INT32)
    kept = builder.lshr(bits, INT32(16))
    odd = builder.and_(kept, INT32(1))
    increment = builder.add(odd, INT32(0x7FFF))
    rounded = builder.add(bits, increment)
    high_half = builder.lshr(rounded, INT32(16))
    return builder.trunc(high_half, INT16)


@intrinsic(prefer_literal=True)
def highest(typing, numbers, count):
    """Return the highest of `count` fp32 numbers at this address, ignoring NaN."""
    size = count.literal_value

    def code(context, builder, signature, arguments):
        vector = _load_vector(builder, arguments[0], size)
        name = f"llvm.vector.reduce.fmax.v{size}f32"
        reduce = declare(builder, name, FP32, [vector.type])
        return builder.call(reduce, [vector])

    return types.float32(numbers, count), code


@intrinsic(prefer_literal=True)
def total(typing, numbers, count):
    """Return the pairwise sum of `count` fp32 numbers at this address."""
    size = count.literal_value

    def code(context, builder, signature, arguments):
        vector = _load_vector(builder, arguments[0], size)
        name = f"llvm.vector.reduce.fadd.v{size}f32"
        reduce = declare(builder, name, FP32, [FP32, vector.type])
        zero = FP32(0)
        # reassoc: pairwise, not in the order of the numbers
        return builder.call(reduce, [zero, vector], fastmath=("reassoc",))

    return types.float32(numbers, count), code


def _load_vector(builder, address, size):
    """Load `size` fp32 numbers, which need no alignment as a vector."""
    vector = ir.VectorType(FP32, size)
    pointer = builder.inttoptr(address, vector.as_pointer())
    return builder.load(pointer, align=4)
