"""The sampling noise of a token (see `engine/sampling/noise.py`), with the same bits."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.llvm import INT32, INT64

TOKEN = INT32(0x9E3779B1)
UNIT = 2.0**-31  # what a bit of the noise counts


def _mix(builder, h):
    """Murmur3's 32-bit finaliser."""
    h = builder.xor(h, builder.lshr(h, INT32(16)))
    h = builder.mul(h, INT32(0x85EBCA6B))
    h = builder.xor(h, builder.lshr(h, INT32(13)))
    h = builder.mul(h, INT32(0xC2B2AE35))
    return builder.xor(h, builder.lshr(h, INT32(16)))


@intrinsic
def noise_key(typing, seed, position):
    """Return the key of a row's noise, for an int64 seed and position."""

    def code(context, builder, signature, arguments):
        seed, position = arguments
        low = builder.trunc(seed, INT32)
        high = builder.trunc(builder.lshr(seed, INT64(32)), INT32)
        place = builder.mul(builder.trunc(position, INT32), TOKEN)
        key = _mix(builder, builder.add(low, place))
        return _mix(builder, builder.xor(key, high))

    return types.int32(types.int64, types.int64), code


@intrinsic
def second_key(typing, key):
    """Return what `noise_bits` adds between its two rounds."""

    def code(context, builder, signature, arguments):
        return _mix(builder, builder.add(arguments[0], TOKEN))

    return types.int32(types.int32), code


@intrinsic
def noise_bits(typing, token, key, second):
    """Return the 31 random bits of a token."""

    def code(context, builder, signature, arguments):
        token, key, second = arguments
        bits = _mix(builder, builder.xor(builder.mul(token, TOKEN), key))
        bits = _mix(builder, builder.add(bits, second))
        return builder.and_(bits, INT32(0x7FFFFFFF))

    return types.int32(types.int32, types.int32, types.int32), code


@njit(fastmath=EXACT, error_model="numpy")
def log_noise(bits):
    """Return the logarithm of the exponential(1) draw that these bits are.

    The logarithms are computed in fp64 and rounded to fp32 once each. torch's are off by up to one
    unit in the last place.
    """
    uniform = (np.float32(bits) + np.float32(0.5)) * np.float32(UNIT)
    # fp64 holds the difference exactly: a uniform is a multiple of 2**-32.
    draw = np.float32(-math.log(1.0 - np.float64(uniform))) if uniform < 1 else np.float32(32)
    draw = min(max(draw, np.float32(2.0**-33)), np.float32(32))
    return np.float32(math.log(np.float64(draw)))
