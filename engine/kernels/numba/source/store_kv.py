"""Store the keys and values of tokens in their slots, as they are or as codes with a scale.

The codes are those of engine/ops/kv_codes.py, bit by bit.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import AS_E4M3, ITEM_BYTES, TASK, TILE, AttentionCall
from engine.kernels.numba.source.intrinsics import (
    array_at,
    bits_of,
    prefetch_bytes,
    take,
    to_fp32,
)

LARGEST_INT8 = 127.0
LARGEST_E4M3 = 448.0
NORMAL_E4M3 = np.float32(2**-6)  # the smallest normal number
INFINITE = np.int32(0x7F800000)  # its bits; those of NaN are above
UNITS_E4M3 = np.float32(2**9)  # in 1.0, of numbers below it


@njit(inline="always")
def to_int8(number):
    """Round a number to a whole one; ties to even."""
    return np.int32(np.rint(number)) & 0xFF


@njit(inline="always")
def to_e4m3(number):
    """Round a number of magnitude up to 448 to the bits of e4m3; ties to even."""
    bits = bits_of(number)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 20) & 1
    # e4m3 keeps 3 of 23 bits of the fraction, and its exponent has a bias of 7, not 127.
    kept = (magnitude + 0x7FFFF + odd) >> 20
    code = kept - (120 << 3)
    if abs(number) < NORMAL_E4M3:
        code = np.int32(np.rint(abs(number) * UNITS_E4M3))
    return sign | code


@njit(inline="always")
def scale_of(numbers, dim, inverse):
    """Return the scale of a head's numbers; NaN if a number is NaN or infinite."""
    top = np.int32(0)
    for d in range(dim):
        magnitude = bits_of(abs(to_fp32(numbers[d])))
        top = max(top, magnitude)  # the order of the bits is that of the numbers
    if top >= INFINITE:
        return np.float32(np.nan)
    return np.int32(top).view(np.float32) * inverse


@njit(inline="always")
def quotient(number, scale, largest):
    """Return number / scale, at most `largest` in magnitude; 0 for NaN."""
    divisor = scale if scale > 0 else np.float32(1)
    found = number / divisor
    if np.isnan(found):
        return np.float32(0)
    return min(max(found, -largest), largest)


def plain_store(half: bool):
    """Return the function that stores one head of a token's key and value as they are."""
    item = 2 if half else 4
    kind = np.uint16 if half else np.float32

    @njit(inline="always")
    def store_token(call, token, head):
        dim = call.dim
        block_size = call.block_size
        blocks = array_at(call.token_blocks, (1,), np.int64)
        offsets = array_at(call.token_offsets, (1,), np.int64)
        block = blocks[token]
        offset = offsets[token]
        begin = item * dim * block_size * (block * call.heads + head)
        first_key = token * call.key_stride + head * dim
        first_value = token * call.value_stride + head * dim
        key = array_at(call.key + item * first_key, (dim,), kind)
        value = array_at(call.value + item * first_value, (dim,), kind)
        keys = array_at(call.keys + begin + item * offset, (dim, block_size), kind)
        values = array_at(call.values + begin + item * offset * dim, (dim,), kind)
        for d in range(dim):
            keys[d, 0] = key[d]
        if call.values:
            for d in range(dim):
                values[d] = value[d]

    return store_token


def coded_store(half: bool, form: int):
    """Return the function that stores one head of a token's key and value as codes."""
    item = 2 if half else 4
    kind = np.uint16 if half else np.float32
    encode = to_e4m3 if form == AS_E4M3 else to_int8
    largest = np.float32(LARGEST_E4M3 if form == AS_E4M3 else LARGEST_INT8)
    inverse = np.float32(1) / largest

    @njit(inline="always")
    def store_token(call, token, head):
        dim = call.dim
        block_size = call.block_size
        blocks = array_at(call.token_blocks, (1,), np.int64)
        offsets = array_at(call.token_offsets, (1,), np.int64)
        offset = offsets[token]
        place = (blocks[token] * call.heads + head) * block_size
        first_key = token * call.key_stride + head * dim
        first_value = token * call.value_stride + head * dim
        key = array_at(call.key + item * first_key, (dim,), kind)
        value = array_at(call.value + item * first_value, (dim,), kind)
        keys = array_at(call.keys + place * dim + offset, (dim, block_size), np.uint8)
        values = array_at(call.values + (place + offset) * dim, (dim,), np.uint8)
        key_scales = array_at(call.key_scales, (1,), np.float32)
        value_scales = array_at(call.value_scales, (1,), np.float32)
        key_scale = scale_of(key, dim, inverse)
        key_scales[place + offset] = key_scale
        for d in range(dim):
            number = to_fp32(key[d])
            keys[d, 0] = encode(quotient(number, key_scale, largest))
        if call.values:
            value_scale = scale_of(value, dim, inverse)
            value_scales[place + offset] = value_scale
            for d in range(dim):
                number = to_fp32(value[d])
                values[d] = encode(quotient(number, value_scale, largest))

    return store_token


@njit(inline="always")
def prefetch_stored(call, token, head, form):
    """Prefetch the memory in which a token is stored: its value, and the block of its key."""
    blocks = array_at(call.token_blocks, (1,), np.int64)
    offsets = array_at(call.token_offsets, (1,), np.int64)
    value_bytes = ITEM_BYTES[form] * call.dim
    begin = value_bytes * call.block_size * (blocks[token] * call.heads + head)
    prefetch_bytes(call.keys + begin, value_bytes * call.block_size)
    prefetch_bytes(call.values + begin + value_bytes * offsets[token], value_bytes)


def token_store(half: bool, form: int):
    """Return the function (call, token, head) that stores one head of a token."""
    if ITEM_BYTES[form] == 1:
        return coded_store(half, form)
    return plain_store(half)


def store_kernel(half: bool, form: int):
    """Return the kernel that stores the keys and values that other tasks may read.

    A thread stores about a block at a time: neighbouring keys of a block share cache lines.
    """
    store_token = token_store(half, form)

    def store(pointer):
        call = carray(pointer, 1)[0]
        at_once = call.block_size // TILE  # tasks
        tasks = array_at(call.tasks, (1,), TASK)
        while True:
            number = take(call.counter)
            begin = number // call.heads * at_once
            head = number % call.heads
            if begin >= call.num_tasks:
                return
            for index in range(begin, min(begin + at_once, call.num_tasks)):
                task = tasks[index]
                if task.is_stored_ahead:
                    end = task.first_token + task.num_tokens
                    for token in range(task.first_token, end):
                        store_token(call, token, head)

    return store, AttentionCall
