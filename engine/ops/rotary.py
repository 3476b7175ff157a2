"""Rotary position embedding (arXiv 2104.09864), in both layouts of the rotated pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.ops.kernels import Kernels
from engine.ops.norm import rms_norm

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and signed sines [T, 1, R]


def apply_rotary(
    x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, kernels: Kernels
) -> torch.Tensor:
    """Rotate dimensions i and i + R/2 of each head by the token's angle (Llama's layout).

    Only the first R dimensions are rotated; the others pass unchanged. The first half of `sin_T1R`
    is negated, so that it can be multiplied with a plain roll. The rotation then takes three
    operations instead of seven.
    """
    if kernels == "triton":
        from engine.kernels.triton.rotary import rotate

        return rotate(x_THD, cos_T1R, sin_T1R)
    if kernels == "numba":
        from engine.kernels.numba.rowwise import rotate as rotate_rows

        return rotate_rows(x_THD, cos_T1R, sin_T1R)
    width = cos_T1R.shape[-1]
    x_THR = x_THD[..., :width]
    rolled = torch.roll(x_THR, width // 2, dims=-1)
    turned = (x_THR * cos_T1R).addcmul_(rolled, sin_T1R)
    return turned if width == x_THD.shape[-1] else torch.cat((turned, x_THD[..., width:]), dim=-1)


def apply_rotary_pairs(
    x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, kernels: Kernels
) -> torch.Tensor:
    """Rotate dimensions 2i and 2i + 1 of each head, the layout of the paper.

    Only the first R dimensions are rotated. The even dimensions of `sin_T1R` are negated.
    """
    if kernels == "triton":
        from engine.kernels.triton.rotary import rotate

        return rotate(x_THD, cos_T1R, sin_T1R, pairs=True)
    if kernels == "numba":
        from engine.kernels.numba.rowwise import rotate as rotate_rows

        return rotate_rows(x_THD, cos_T1R, sin_T1R, pairs=True)
    width = cos_T1R.shape[-1]
    x_THR = x_THD[..., :width]
    swapped = x_THR.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = (x_THR * cos_T1R).addcmul_(swapped, sin_T1R)
    return turned if width == x_THD.shape[-1] else torch.cat((turned, x_THD[..., width:]), dim=-1)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An rms_norm of the queries and keys of each head, before or after the rotation."""

    q_weight: torch.Tensor | None  # [D]; None: no weight
    k_weight: torch.Tensor | None
    eps: float
    offset: bool = False  # the stored weight is weight - 1
    after: bool = False  # after the rotation


@dataclass(frozen=True, slots=True)
class Rotation:
    """How queries and keys are normed and rotated; the fields are those of `norm_and_rotate`."""

    angles: Angles | None
    norm: HeadNorm | None
    pairs: bool = False


def norm_and_rotate(
    qk: torch.Tensor,
    heads: int,
    angles: Angles | None,
    norm: HeadNorm | None,
    *,
    pairs: bool = False,
    kernels: Kernels,
) -> torch.Tensor:
    """Return queries and keys [T, H + Hkv, D] normed and rotated; the first `heads` are queries.

    Without `angles` they are not rotated. With `pairs`, neighbouring dimensions are.
    """
    if norm and not norm.after and kernels == "numba":
        from engine.kernels.numba.rowwise import norm_heads

        weights = norm.q_weight, norm.k_weight
        qk = norm_heads(qk, heads, *weights, norm.eps, offset=norm.offset)
    elif norm and not norm.after:
        q, k = qk[:, :heads], qk[:, heads:]
        q = rms_norm(q, norm.q_weight, norm.eps, offset=norm.offset, kernels=kernels)
        k = rms_norm(k, norm.k_weight, norm.eps, offset=norm.offset, kernels=kernels)
        qk = torch.cat((q, k), dim=1)
    if angles is not None:
        rotate = apply_rotary_pairs if pairs else apply_rotary
        qk = rotate(qk, *angles, kernels=kernels)
    if norm and norm.after:  # no supported model has weights here
        qk = rms_norm(qk, None, norm.eps, kernels=kernels)
    return qk


def rotate_and_store(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: Angles | None,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    norm: HeadNorm | None,
    *,
    pairs: bool = False,
) -> torch.Tensor:
    """Norm, rotate and store keys and values in one launch; return the queries [T, H, D].

    `cache` holds a layer's keys and values [blocks, Hkv, block_size, D], then the block and the
    offset in it of each token, [T] int64 each. Only Triton has this kernel; `norm_and_rotate` is
    the reference of its arithmetic.
    """
    from engine.kernels.triton.rotary import rotate

    q, k, v = qkv
    cos, sin = angles or (None, None)
    return rotate(q, cos, sin, k=k, v=v, cache=cache, **norm_arguments(norm), pairs=pairs)


def norm_arguments(norm: HeadNorm | None) -> dict[str, Any]:
    """Return a head norm as Triton's launches take it."""
    if norm is None:
        return {}
    return {
        "norm": "last" if norm.after else "first",
        "weights": (norm.q_weight, norm.k_weight),
        "eps": norm.eps,
        "offset": norm.offset,
    }
