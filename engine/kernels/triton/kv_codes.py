"""Keys and values in 8 bits: rounded when they are stored, widened when they are read.

The codes are those of engine/ops/kv_codes.py. Kernels get e4m3 as uint8, because GPUs before sm_89
have no instructions for fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {torch.int8: torch.int8, torch.float8_e4m3fn: torch.uint8}  # what kernels get
# 1.5 * 2**23: adding it to a small number leaves no bits for a fraction.
ROUNDING: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def rounded(numbers):
    """Round numbers below 2**22 in magnitude to whole ones; ties to even."""
    return (numbers + ROUNDING) - ROUNDING


@triton.jit
def to_e4m3(numbers):
    """Round fp32 numbers of magnitude up to 448 to the bits of e4m3; ties to even."""
    bits = numbers.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 20) & 1
    # e4m3 keeps 3 of 23 bits of the fraction, and its exponent has a bias of 7, not 127.
    kept = (magnitude + 0x7FFFF + odd) >> 20
    normal = kept - 960
    size = tl.abs(numbers)
    subnormal = rounded(size * 512.0).to(tl.int32)
    code = tl.where(size < 0.015625, subnormal, normal)
    return (sign | code).to(tl.uint8)


@triton.jit
def encoded(numbers, dtype: tl.constexpr):
    """Return the codes of numbers that are at most the largest code in magnitude."""
    if dtype == tl.uint8:
        return to_e4m3(numbers)
    else:
        return rounded(numbers).to(tl.int8)


@triton.jit
def from_e4m3(codes):
    """Return the numbers of e4m3 codes as fp16, which holds them all. The codes hold no NaN."""
    bits = codes.to(tl.int16)
    sign = (bits & 0x80) << 8
    magnitude = (bits & 0x7F) << 7
    # The exponent has a bias of 7 instead of 15. Subnormal numbers of fp16 are exact, too.
    numbers = (sign | magnitude).to(tl.float16, bitcast=True)
    return numbers * 256.0


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """Return the numbers of codes, without their scales, in `dtype`."""
    if codes.dtype == tl.uint8:
        return from_e4m3(codes).to(dtype)
    else:
        return codes.to(tl.float32).to(dtype)  # the interpreter cannot convert int8 to bf16


@triton.jit
def quotients(numbers, scale, largest):
    """Return numbers / scale, at most `largest` in magnitude; 0 for NaN."""
    divisors = tl.zeros(numbers.shape, tl.float32) + tl.where(scale > 0, scale, 1.0)
    found = tl.div_rn(numbers, divisors)
    found = tl.where(found == found, found, 0.0)
    return tl.minimum(tl.maximum(found, -largest), largest)


@triton.jit
def store_row(codes, scales, row, numbers, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Round a head's numbers, and store them and their scale in this row."""
    dims = tl.arange(0, DIMS)
    real = dims < HEAD_DIM
    x = tl.load(numbers + dims, mask=real, other=0.0).to(tl.float32)
    is_e4m3: tl.constexpr = codes.dtype.element_ty == tl.uint8
    largest: tl.constexpr = 448.0 if is_e4m3 else 127.0
    # The sum is NaN if a number is NaN or infinite; a maximum may ignore NaN.
    scale = tl.max(tl.abs(x), 0) * (1 / largest) + tl.sum(x * 0.0, 0)
    found = encoded(quotients(x, scale, largest), codes.dtype.element_ty)
    place = row * HEAD_DIM + dims
    tl.store(codes + place, found, mask=real)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["blocks", "offsets"])
def store_codes_kernel(
    keys,  # [blocks, Hkv, block_size, D] int8, or e4m3 as uint8
    values,  # the same, or None
    key_scales,  # [blocks, Hkv, block_size] fp32
    value_scales,
    key,  # [T, Hkv, D], only the last dimension is contiguous
    value,
    blocks,  # [T] int64
    offsets,  # [T] int64
    block_size,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block_row = tl.load(blocks + token) * tl.num_programs(1) + head
    row = block_row * block_size + tl.load(offsets + token)
    key += token * key_stride + head * key_head_stride
    store_row(keys, key_scales, row, key, HEAD_DIM, DIMS)
    if values is not None:
        value += token * value_stride + head * value_head_stride
        store_row(values, value_scales, row, value, HEAD_DIM, DIMS)


def store_codes(
    cache: tuple[torch.Tensor, torch.Tensor | None],
    scales: tuple[torch.Tensor, torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor | None,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write `key` and `value` [T, Hkv, D] as codes to the keys and values of `cache`.

    Those are [blocks, Hkv, block_size, D], int8 or float8_e4m3fn; `scales` are theirs, without the
    last dimension. Token t is written to offset `offsets[t]` of block `blocks[t]`, [T] int64 each.
    Values are None if they are parts of keys.
    """
    tokens, heads, dim = key.shape
    store_codes_kernel[tokens, heads](
        *(None if part is None else part.view(KINDS[part.dtype]) for part in cache),
        *scales,
        key,
        value,
        blocks,
        offsets,
        cache[0].shape[2],
        key.stride(0),
        key.stride(1),
        *(value.stride()[:2] if value is not None else (0, 0)),
        HEAD_DIM=dim,
        DIMS=triton.next_power_of_2(dim),
        num_warps=1,
    )
