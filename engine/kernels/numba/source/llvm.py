"""LLVM types, and instructions that the code generators of kernels share."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

INT8 = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FP32 = ir.FloatType()


class _BF16(ir.Type):
    """LLVM's bfloat, for which llvmlite has no type."""

    def _to_string(self):
        return "bfloat"


BF16 = _BF16()  # one instance, because llvmlite compares types


def element_bytes(element):
    """Return the size of a number of LLVM type `element`, fp32 or an integer."""
    return 4 if element is FP32 else element.width // 8


def offset(builder, address, distance):
    """Return the address `distance` bytes after `address`; the distance is a Python integer."""
    return builder.add(address, INT64(distance))


def load(builder, address, kind, align):
    """Load a value of type `kind` from an address that is a multiple of `align`."""
    pointer = builder.inttoptr(address, kind.as_pointer())
    return builder.load(pointer, align=align)


def store(builder, value, address, align):
    """Store a value at an address that is a multiple of `align`."""
    pointer = builder.inttoptr(address, value.type.as_pointer())
    builder.store(value, pointer, align=align)


def prefetch(builder, address, locality):
    """Read a cache line ahead of use; a `locality` of 3 means the nearest cache."""
    void = ir.VoidType()
    arguments = [cgutils.voidptr_t, INT32, INT32, INT32]
    instruction = declare(builder, "llvm.prefetch.p0", void, arguments)
    place = builder.inttoptr(address, cgutils.voidptr_t)
    read = INT32(0)
    data = INT32(1)
    locality = INT32(locality)
    builder.call(instruction, [place, read, locality, data])


def spread(builder, number, lanes):
    """Return a vector with `number` in each of its lanes."""
    vector = ir.VectorType(number.type, lanes)
    lane_numbers = ir.VectorType(INT32, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    first_lane = ir.Constant(lane_numbers, None)  # zeros: every lane takes lane 0
    single = builder.insert_element(undefined, number, INT32(0))
    return builder.shuffle_vector(single, undefined, first_lane)


def widen(builder, bits):
    """Convert bf16, given as INT16, to fp32."""
    word = builder.zext(bits, INT32)
    high_half = builder.shl(word, INT32(16))
    return builder.bitcast(high_half, FP32)


def widen_vector(builder, bits, lanes):
    """Convert a vector of bf16, given as INT16, to fp32."""
    words = ir.VectorType(INT32, lanes)
    numbers = ir.VectorType(FP32, lanes)
    shift = ir.Constant(words, [16] * lanes)
    high_halves = builder.shl(builder.zext(bits, words), shift)
    return builder.bitcast(high_halves, numbers)


def widen_int8_vector(builder, numbers, lanes):
    """Convert a vector of INT8 to fp32."""
    words = builder.sext(numbers, ir.VectorType(INT32, lanes))
    return builder.sitofp(words, ir.VectorType(FP32, lanes))


def widen_e4m3_vector(builder, bits, lanes):
    """Convert a vector of e4m3, given as INT8, to fp32. It holds no NaN."""
    words = ir.VectorType(INT32, lanes)
    floats = ir.VectorType(FP32, lanes)

    def each(number):
        return ir.Constant(words, [number] * lanes)

    word = builder.zext(bits, words)
    magnitude = builder.and_(word, each(0x7F))
    fraction = builder.shl(magnitude, each(20))
    # The exponent has a bias of 7 instead of 127.
    normal = builder.bitcast(builder.add(fraction, each(120 << 23)), floats)
    # A subnormal's bits count 2**-9. With a one in front they are a number from 2**-6 on.
    raised = builder.bitcast(builder.add(fraction, each(121 << 23)), floats)
    subnormal = builder.fsub(raised, ir.Constant(floats, [2**-6] * lanes))
    is_subnormal = builder.icmp_unsigned("<", magnitude, each(8))
    unsigned = builder.bitcast(builder.select(is_subnormal, subnormal, normal), words)
    sign = builder.shl(builder.and_(word, each(0x80)), each(24))
    return builder.bitcast(builder.or_(unsigned, sign), floats)


def declare(builder, name, result, arguments):
    """Return LLVM's function `name`, declared in the module that `builder` writes."""
    function = ir.FunctionType(result, arguments)
    return cgutils.get_or_insert_function(builder.module, function, name)
