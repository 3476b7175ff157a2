"""Rotary embedding, head norms and the write to the paged KV cache, in one launch.

This is all work between the QKV projection and attention. Each program handles some heads of one
token: one, or HEADS_TOGETHER on chips whose features say so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.chips import features_of
from engine.kernels.triton.overlap import launch_options, wait_for_inputs

HEADS_TOGETHER = 8  # of a program that takes several
# Where heads are normed: not at all, before the rotation, or after it.
NORMS = {"none": 0, "first": 1, "last": 2}
FIRST: tl.constexpr = tl.constexpr(NORMS["first"])
LAST: tl.constexpr = tl.constexpr(NORMS["last"])


@triton.jit
def _scaled(x, partner, weight, at, other, mask, eps, OFFSET: tl.constexpr, DIM: tl.constexpr):
    """Apply an RMS norm to the rows of `x` and `partner`, which hold the same heads in two orders.

    `at` and `other` [1, BLOCK] are the dimensions of their columns.
    """
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x *= scale
    partner *= scale
    if weight is not None:
        x *= tl.load(weight + at, mask, 0.0).to(tl.float32) + OFFSET
        partner *= tl.load(weight + other, mask, 0.0).to(tl.float32) + OFFSET
    return x, partner


@triton.jit
def rotated(
    heads,  # pointers [R, 1]
    real,  # [R]: which of them are read; the others are 0
    weight,  # of the norm, [DIM], or None
    angles,  # (cosines, sines, offset of the token's row in both, [R, 1] or a scalar)
    eps,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load heads, norm and rotate them as `rotate` does; return [R, BLOCK] in fp32."""
    cos, sin, row = angles
    at = tl.arange(0, BLOCK)[None, :]
    other = at ^ 1 if PAIRS else tl.where(at < WIDTH // 2, at + WIDTH // 2, at - WIDTH // 2)
    is_dim = at < DIM
    mask = is_dim & real[:, None]
    x = tl.load(heads + at, mask, 0.0).to(tl.float32)
    partner = tl.load(heads + other, mask, 0.0).to(tl.float32)
    if NORM == FIRST:
        x, partner = _scaled(x, partner, weight, at, other, is_dim, eps, OFFSET, DIM)
    if WIDTH > 0:
        is_rotated = (at < WIDTH) & real[:, None]
        x *= tl.load(cos + row + at, is_rotated, 1.0).to(tl.float32)
        x += partner * tl.load(sin + row + at, is_rotated, 0.0).to(tl.float32)
    if NORM == LAST:
        x, _ = _scaled(x, x, weight, at, at, is_dim, eps, OFFSET, DIM)
    return x


@triton.jit(do_not_specialize=["blocks_ptr", "offsets_ptr"])  # slices, which are not aligned
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
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)[None, :]
    angles = (cos_ptr, sin_ptr, token * WIDTH)
    if group < tl.cdiv(HEADS, GROUP):
        heads = group * GROUP + tl.arange(0, GROUP)
        real = heads < HEADS
        rows = q_ptr + (token * q_stride + heads * q_head_stride)[:, None]
        x = rotated(rows, real, q_weight_ptr, angles, eps, NORM, OFFSET, PAIRS, DIM, WIDTH, BLOCK)
        target = out_ptr + (token * HEADS + heads)[:, None] * DIM + at
        tl.store(target, x.to(out_ptr.dtype.element_ty), (at < DIM) & real[:, None])
    elif KV_HEADS > 0:
        kv_group = group - tl.cdiv(HEADS, GROUP)
        heads = kv_group % tl.cdiv(KV_HEADS, GROUP) * GROUP + tl.arange(0, GROUP)
        real = heads < KV_HEADS
        mask = (at < DIM) & real[:, None]
        first = tl.load(blocks_ptr + token) * (KV_HEADS * block_size) + tl.load(offsets_ptr + token)
        place = (first + heads * block_size)[:, None] * DIM + at
        if kv_group < tl.cdiv(KV_HEADS, GROUP):
            rows = k_ptr + (token * k_stride + heads * k_head_stride)[:, None]
            x = rotated(
                rows, real, k_weight_ptr, angles, eps, NORM, OFFSET, PAIRS, DIM, WIDTH, BLOCK
            )
            tl.store(keys_ptr + place, x.to(keys_ptr.dtype.element_ty), mask)
        else:
            rows = v_ptr + (token * v_stride + heads * v_head_stride)[:, None]
            tl.store(values_ptr + place, tl.load(rows + at, mask), mask)


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
    group = HEADS_TOGETHER if features_of(q.device).rotates_heads_together else 1
    assert all(source.stride(-1) == 1 for source in sources)
    assert cos is None or cos.is_contiguous()
    assert sin is None or sin.is_contiguous()
    if tokens:
        _rotate_kernel[(tokens, triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group))](
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
            GROUP=group,
            DIM=dim,
            WIDTH=0 if cos is None else cos.shape[-1],
            NORM=NORMS[norm],
            OFFSET=int(offset),
            PAIRS=pairs,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=1 if group == 1 else 4,
            **launch_options(q.device),
        )
    return out
