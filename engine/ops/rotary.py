"""Rotary position embedding (arXiv 2104.09864), in either layout of the pairs it rotates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.ops.dispatch import compiled_for, kernels_for
from engine.ops.norm import rms_norm


def apply_rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i of each head against i + D/2, as Llama stores them, by the token's angle.

    `sin_T1D` carries the sign of its half (minus in the first), so that rotating the halves by a
    roll is all that is left: three operations instead of seven.
    """
    if kernels_for(x_THD):
        from engine.kernels.rotary import rotate

        return rotate(x_THD, cos_T1D, sin_T1D)
    if compiled_for(x_THD):
        from engine.kernels.cpu.rows import rotate as rotate_rows

        return rotate_rows(x_THD, cos_T1D, sin_T1D)
    rolled = torch.roll(x_THD, x_THD.shape[-1] // 2, dims=-1)
    return (x_THD * cos_T1D).addcmul_(rolled, sin_T1D)


def apply_rotary_pairs(
    x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
) -> torch.Tensor:
    """Rotate dimension 2i of each head against 2i + 1, as the paper has it.

    `sin_T1D` carries the sign (minus in the even dimensions).
    """
    if kernels_for(x_THD):
        from engine.kernels.rotary import rotate

        return rotate(x_THD, cos_T1D, sin_T1D, pairs=True)
    swapped = x_THD.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x_THD * cos_T1D).addcmul_(swapped, sin_T1D)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An rms_norm of each head's query and key, before their rotation or after it."""

    q_weight: torch.Tensor | None  # [D]; None: it only scales
    k_weight: torch.Tensor | None
    eps: float
    offset: bool = False  # weights are stored as their distance from one
    after: bool = False


def norm_and_rotate(
    qk: torch.Tensor,
    heads: int,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm: HeadNorm | None,
) -> torch.Tensor:
    """Queries and keys [T, H + Hkv, D], of which the first `heads` are queries, as attention takes
    them."""
    if norm and not norm.after:
        q, k = qk[:, :heads], qk[:, heads:]
        q = rms_norm(q, norm.q_weight, norm.eps, offset=norm.offset)
        k = rms_norm(k, norm.k_weight, norm.eps, offset=norm.offset)
        qk = torch.cat((q, k), dim=1)
    qk = apply_rotary(qk, *angles)
    if norm and norm.after:  # no served model has weights there
        qk = rms_norm(qk, None, norm.eps)
    return qk


def rotate_and_store(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    norm: HeadNorm | None,
) -> torch.Tensor:
    """norm_and_rotate and the write into a layer's cache in one launch: queries [T, H, D].

    `cache` is keys and values [blocks, Hkv, block_size, D], and block and place in it of each
    token, [T] int64. Only where `kernels_for` says so: torch would do all that one by one.
    """
    from engine.kernels.rotary import rotate

    q, k, v = qkv
    if norm is None:
        return rotate(q, *angles, k=k, v=v, cache=cache)
    return rotate(
        q,
        *angles,
        k=k,
        v=v,
        cache=cache,
        norm="last" if norm.after else "first",
        weights=(norm.q_weight, norm.k_weight),
        eps=norm.eps,
        offset=norm.offset,
    )
