"""The noise of `engine.sampling.noise` inside kernels: the same hash with the same bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(h):
    """Apply murmur3's 32-bit finaliser to uint32."""
    h ^= h >> 16
    h *= tl.full([], 0x85EBCA6B, tl.uint32)
    h ^= h >> 13
    h *= tl.full([], 0xC2B2AE35, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def noise_key(seed, position):
    """Return the part of the hash that all tokens of a row share, uint32, from int64 arguments."""
    golden = tl.full([], 0x9E3779B1, tl.int64)
    low = seed & 0xFFFFFFFF
    key = mix((low + position * golden).to(tl.uint32))
    high = (seed >> 32).to(tl.uint32)
    return mix(key ^ high)


@triton.jit
def noise_bits(key, tokens):
    """Return 31 random bits as int32 for each of the int32 `tokens`."""
    golden = tl.full([], 0x9E3779B1, tl.uint32)
    second_key = mix(key + golden)
    first = mix(tokens.to(tl.uint32) * golden ^ key)
    second = mix(first + second_key)
    return (second & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def log_noise(key, tokens):
    """Return the logarithm of exponential(1) draws, fp32; s - log_noise is s plus Gumbel noise.

    A draw is -log1p(-u). Up to u = 1/2 it is computed by the series of the inverse hyperbolic
    tangent: a GPU's logarithm is too inaccurate for small draws, and the smallest draw wins.
    """
    numbers = noise_bits(key, tokens).to(tl.float32) + 0.5
    u = numbers * 4.656612873077393e-10  # 2^-31
    z = u / (2.0 - u)
    square = z * z
    series = 1 / 11 + square / 13
    series = 1 / 9 + square * series
    series = 1 / 7 + square * series
    series = 1 / 5 + square * series
    series = 1 / 3 + square * series
    near = 2.0 * z * (1.0 + square * series)
    rest = tl.maximum(1.0 - u, 1e-30)
    far = tl.minimum(-tl.log(rest), 32.0)
    draws = tl.where(u < 0.5, near, far)
    smallest = 1.1641532182693481e-10  # 2^-33
    return tl.log(tl.maximum(draws, smallest))
