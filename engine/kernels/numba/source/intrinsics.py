"""Instructions on single values that kernels need and that Numba's Python cannot express."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from engine.kernels.numba.call import CACHE_LINE
from engine.kernels.numba.source.llvm import (
    BF16,
    FP32,
    INT16,
    INT32,
    INT64,
    declare,
    load,
    prefetch,
    spread,
    store,
    widen,
)

LANES = 16  # numbers that a reduction takes at a time
VECTOR = ir.VectorType(FP32, LANES)


@intrinsic
def array_at(typing, address, shape, kind):
    """Return the array at this address; the size of its first dimension does not matter.

    It is Numba's `carray` for an address, without the time that Numba needs to compile that.
    """
    array = types.Array(kind.dtype, len(shape), "C")

    def code(context, builder, signature, arguments):
        made = context.make_array(array)(context, builder)
        element = context.get_data_type(array.dtype)
        sizes = cgutils.unpack_tuple(builder, arguments[1])
        stride = INT64(context.get_abi_sizeof(element))
        strides = [stride]  # bytes
        for size in reversed(sizes[1:]):
            stride = builder.mul(stride, size)
            strides.insert(0, stride)
        data = builder.inttoptr(arguments[0], element.as_pointer())
        populate_array(made, data, sizes, strides, strides[-1], meminfo=None)
        return made._getvalue()

    return array(address, shape, kind), code


@intrinsic
def on_stack(typing, count):
    """Return the address of room for `count` fp32 numbers, which ends with the kernel's call.

    It must not be called in a loop, which would take more room each time.
    """

    def code(context, builder, signature, arguments):
        room = builder.alloca(FP32, size=arguments[0])
        room.align = CACHE_LINE
        return builder.ptrtoint(room, INT64)

    return types.int64(types.int64), code


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
def prefetch_bytes(typing, address, count):
    """Prefetch `count` bytes at this address into the L2 cache."""

    def code(context, builder, signature, arguments):
        address, count = arguments
        with cgutils.for_range_slice(builder, INT64(0), count, INT64(CACHE_LINE)) as (first, _):
            prefetch(builder, builder.add(address, first), locality=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def write_addresses(typing, table, first, count, step):
    """Write `count` addresses to a table: from `first` on, `step` bytes apart."""

    def code(context, builder, signature, arguments):
        table, first, count, step = arguments
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(table, builder.mul(loop.index, INT64(INT64.width // 8)))
            address = builder.add(first, builder.mul(loop.index, step))
            store(builder, address, place, align=8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic
def copy_fp32(typing, source, target, count):
    """Copy `count` fp32 numbers from one address to another."""

    def code(context, builder, signature, arguments):
        source, target, count = arguments
        pointers = [builder.inttoptr(each, FP32.as_pointer()) for each in (target, source)]
        cgutils.raw_memcpy(builder, *pointers, count, 4, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


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
def to_exact_element(typing, number, array):
    """Convert a fp32 number that the array's type, fp32 or bf16, holds exactly."""
    is_fp32 = isinstance(array.dtype, types.Float)

    def code(context, builder, signature, arguments):
        number = arguments[0]
        if is_fp32:
            return number
        return builder.trunc(builder.lshr(builder.bitcast(number, INT32), INT32(16)), INT16)

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


@intrinsic
def round_to_bf16(typing, numbers, count):
    """Replace `count` fp32 numbers at this address by as many bf16, without gaps (AVX512_BF16).

    `count` is a multiple of LANES.
    """

    def code(context, builder, signature, arguments):
        address, count = arguments
        rounded = ir.VectorType(BF16, LANES)
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        rounding = declare(builder, name, rounded, [VECTOR])
        with cgutils.for_range_slice(builder, INT64(0), count, INT64(LANES)) as (first, _):
            place = builder.add(address, builder.mul(first, INT64(4)))
            vector = load(builder, place, VECTOR, align=4)
            target = builder.add(address, builder.mul(first, INT64(2)))
            store(builder, builder.call(rounding, [vector]), target, align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def highest(typing, numbers, count):
    """Return the highest of `count` fp32 numbers at this address, ignoring NaN.

    `count` is a multiple of LANES.
    """

    def code(context, builder, signature, arguments):
        lowest = ir.Constant(VECTOR, [float("-inf")] * LANES)
        lanes = _fold(builder, arguments, lowest, higher)
        maximum = declare(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", FP32, [VECTOR])
        return builder.call(maximum, [lanes], fastmath=("nnan",))

    def higher(builder, old, new):
        is_higher = builder.fcmp_ordered(">", new, old)  # not if it is NaN
        return builder.select(is_higher, new, old)

    return types.float32(types.int64, types.int64), code


@intrinsic
def total(typing, numbers, count):
    """Return the sum of `count` fp32 numbers at this address; `count` is a multiple of LANES.

    Each lane is summed in order, then the lanes pairwise.
    """

    def code(context, builder, signature, arguments):
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        lane_sum = declare(builder, name, FP32, [FP32, VECTOR])
        lanes = _fold(builder, arguments, ir.Constant(VECTOR, None), ir.IRBuilder.fadd)
        # reassoc: pairwise, not in the order of the lanes
        return builder.call(lane_sum, [FP32(0), lanes], fastmath=("reassoc",))

    return types.float32(types.int64, types.int64), code


@intrinsic
def add_in_lanes(typing, sums, factor, numbers, count):
    """Multiply LANES sums at an address by a factor, and add `count` numbers to them in turn.

    `count` is a multiple of LANES.
    """

    def code(context, builder, signature, arguments):
        sums, factor, *numbers = arguments
        old = load(builder, sums, VECTOR, align=4)
        kept = builder.fmul(old, spread(builder, factor, LANES))
        added = _fold(builder, numbers, kept, ir.IRBuilder.fadd)
        store(builder, added, sums, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), code


def _fold(builder, numbers, start, combine):
    """Combine the vectors of numbers (address, count) one after another."""
    address, count = numbers
    combined = cgutils.alloca_once_value(builder, start)
    with cgutils.for_range_slice(builder, INT64(0), count, INT64(LANES)) as (first, _):
        place = builder.add(address, builder.mul(first, INT64(4)))
        vector = load(builder, place, VECTOR, align=4)
        builder.store(combine(builder, builder.load(combined), vector), combined)
    return builder.load(combined)
