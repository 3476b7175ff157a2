"""Vectors as bytes, in the number formats of vLLM's `embed_dtype`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from server.generation.embedding import Vectors

NumberFormat = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
EXPONENT_BITS = {"fp8_e4m3": 4, "fp8_e5m2": 5}
# Codes of finite numbers without a sign. e4m3 has no infinity, and one NaN.
FINITE_CODES = {"fp8_e4m3": 127, "fp8_e5m2": 124}


def vector_bytes(vectors: Vectors, number_format: NumberFormat, endianness: Endianness) -> bytes:
    """Return the numbers, rounded to the nearest of the format. `native` is little-endian."""
    numbers: Any
    if number_format == "float32":
        numbers = vectors.astype("<f4")
    elif number_format == "float16":
        numbers = vectors.astype("<f2")
    elif number_format == "bfloat16":
        numbers = _bfloat16(vectors)
    else:
        numbers = _float8(vectors, number_format)
    if endianness == "big":
        numbers = numbers.byteswap()
    return bytes(numbers.tobytes())


def _bfloat16(vectors: Vectors) -> Any:
    bits = vectors.astype("<f4").view("<u4")
    half = 0x7FFF + ((bits >> 16) & 1)  # ties go to the even number
    return ((bits + half) >> 16).astype("<u2")


def _float8(vectors: Vectors, number_format: str) -> Any:
    """Return the codes of the nearest numbers; larger ones become the largest."""
    mantissa_bits = 7 - EXPONENT_BITS[number_format]
    bias = 2 ** (EXPONENT_BITS[number_format] - 1) - 1
    codes = np.arange(FINITE_CODES[number_format])
    exponents = codes >> mantissa_bits
    fractions = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    steps = 2.0 ** (np.maximum(exponents, 1) - bias)
    values = (fractions + (exponents > 0)) * steps
    middles = (values[1:] + values[:-1]) / 2
    sizes = np.abs(vectors.astype("<f8"))
    lower = np.searchsorted(middles, sizes, side="left")
    upper = np.searchsorted(middles, sizes, side="right")  # differs on a tie
    nearest = np.where(lower % 2 == 0, lower, upper)
    return (nearest + 128 * np.signbit(vectors)).astype("u1")
