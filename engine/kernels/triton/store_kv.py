"""Write the keys and values of a step's tokens to the paged KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks", "offsets"])
def store_kernel(
    keys,  # [blocks, Hkv, block_size, D]
    values,  # the same, or None
    key,  # [T, Hkv, D], only the last dimension is contiguous
    value,
    blocks,  # [T] int64
    offsets,  # [T] int64
    block_size,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,  # KV_HEADS * HEAD_DIM, padded to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, FEATURES)
    head, dim = feature // HEAD_DIM, feature % HEAD_DIM
    real = feature < KV_HEADS * HEAD_DIM
    row = (tl.load(blocks + token) * KV_HEADS + head) * block_size + tl.load(offsets + token)
    target = row * HEAD_DIM + dim
    k = tl.load(key + token * key_stride + head * key_head_stride + dim, mask=real)
    tl.store(keys + target, k, mask=real)
    if values is not None:
        v = tl.load(value + token * value_stride + head * value_head_stride + dim, mask=real)
        tl.store(values + target, v, mask=real)


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor | None,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write `key` and `value` [T, Hkv, D] to `keys` and `values` [blocks, Hkv, block_size, D].

    Token t is written to offset `offsets[t]` of block `blocks[t]`; both are [T] int64. Values are
    None if they are parts of keys.
    """
    tokens, heads, dim = key.shape
    store_kernel[tokens,](
        keys,
        values,
        key,
        value,
        blocks,
        offsets,
        keys.shape[2],
        key.stride(0),
        key.stride(1),
        *(value.stride()[:2] if value is not None else (0, 0)),
        KV_HEADS=heads,
        HEAD_DIM=dim,
        FEATURES=triton.next_power_of_2(heads * dim),
    )
