"""Rotary embedding, head norms and the write to the paged KV cache, in one launch.

This is all work between the QKV projection and attention. Each program handles one head of one
token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.overlap import launch_options, wait_for_inputs


@triton.jit
def _scaled(x, partner, weight_ptr, at, other, mask, eps, OFFSET: tl.constexpr, DIM: tl.constexpr):
    """Apply an RMS norm to `x` and `partner`, which hold the same head in two orders."""
    scale = tl.rsqrt(tl.sum(x * x) / DIM + eps)
    x *= scale
    partner *= scale
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + at, mask, 0.0).to(tl.float32) + OFFSET
        partner *= tl.load(weight_ptr + other, mask, 0.0).to(tl.float32) + OFFSET
    return x, partner


@triton.jit
def _rotated(
    head_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    mask = at < DIM
    other = at ^ 1 if PAIRS else tl.where(at < WIDTH // 2, at + WIDTH // 2, at - WIDTH // 2)
    x = tl.load(head_ptr + at, mask, 0.0).to(tl.float32)
    partner = tl.load(head_ptr + other, mask, 0.0).to(tl.float32)
    if NORM == "first":
        x, partner = _scaled(x, partner, weight_ptr, at, other, mask, eps, OFFSET, DIM)
    if WIDTH > 0:
        is_rotated = at < WIDTH
        x *= tl.load(cos_ptr + at, is_rotated, 1.0).to(tl.float32)
        x += partner * tl.load(sin_ptr + at, is_rotated, 0.0).to(tl.float32)
    if NORM == "last":
        x, _ = _scaled(x, x, weight_ptr, at, at, mask, eps, OFFSET, DIM)
    return x


@triton.jit(do_not_specialize=["blocks_ptr"])  # a slice from the second KV group on: unaligned
def _rotate_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    blocks_ptr,
    offsets_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_size,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < DIM
    if WIDTH > 0:
        cos_ptr += token * WIDTH
        sin_ptr += token * WIDTH
    if head < HEADS:
        q_ptr += token * q_stride + head * q_head_stride
        x = _rotated(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, eps, NORM, OFFSET, PAIRS, DIM, WIDTH, BLOCK
        )
        out_ptr += (token * HEADS + head) * DIM
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask)
    elif KV_HEADS > 0:
        kv_head = (head - HEADS) % KV_HEADS
        row = (tl.load(blocks_ptr + token) * KV_HEADS + kv_head) * block_size
        place = (row + tl.load(offsets_ptr + token)) * DIM + at
        if head < HEADS + KV_HEADS:
            k_ptr += token * k_stride + kv_head * k_head_stride
            x = _rotated(
                k_ptr, k_weight_ptr, cos_ptr, sin_ptr, eps, NORM, OFFSET, PAIRS, DIM, WIDTH, BLOCK
            )
            tl.store(keys_ptr + place, x.to(keys_ptr.dtype.element_ty), mask)
        else:
            v = tl.load(v_ptr + token * v_stride + kv_head * v_head_stride + at, mask)
            tl.store(values_ptr + place, v, mask)


def rotate(
    q: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    norm: str = "none",
    weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    eps: float = 0.0,
    offset: bool = False,
    pairs: bool = False,
) -> torch.Tensor:
    """Rotate q [T, H, D] by the dense cos and sin [T, 1, R] of engine.ops.rotary; return it dense.

    Only the first R dimensions of each head are rotated, without cos and sin none.
    If given, k [T, Hkv, D] is rotated in the same way and written to `cache` with v. `cache` is
    (keys, values, blocks, offsets): keys and values [blocks, Hkv, block_size, D], and the block and
    offset of each token, [T] int64. Tokens and heads of q, k and v may have any stride.

    `norm` says where each head passes an RMS norm: "none", "first" (before rotation) or "last".
    `weights` [D] are those of q and k; `offset` adds one to them. With `pairs`, dimension 2i is
    rotated against 2i + 1 instead of i against i + R/2.
    """
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sources = [q, q if k is None else k, q if v is None else v]
    kv_heads = 0 if k is None else k.shape[1]
    assert all(source.stride(-1) == 1 for source in sources)
    assert cos is None or cos.is_contiguous()
    assert sin is None or sin.is_contiguous()
    if tokens:
        _rotate_kernel[(tokens, heads + 2 * kv_heads)](
            *sources,
            cos,
            sin,
            *weights,
            out,
            *(cache or (None,) * 4),
            *(stride for source in sources for stride in source.stride()[:2]),
            cache[0].shape[2] if cache else 0,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            WIDTH=0 if cos is None else cos.shape[-1],
            NORM=norm,
            OFFSET=int(offset),
            PAIRS=pairs,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=1,
            **launch_options(q.device),
        )
    return out
