"""Row-wise normalisation. The torch code is the reference that every kernel is tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.gated import silu
from engine.ops.kernels import Kernels

Tensors = tuple[torch.Tensor, torch.Tensor]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    kernels: Kernels,
) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in fp32 (arXiv 1910.07467).

    Without a weight, the result is x / rms(x). With `offset`, the stored weight is weight - 1, and
    the result is rounded to x's dtype only at the end (Gemma).
    """
    if kernels == "triton":
        from engine.kernels.triton.norm import norm

        return norm(x, None, weight, None, eps, offset=offset)[1]
    if kernels == "numba":
        from engine.kernels.numba.rowwise import norm as norm_rows

        return norm_rows(x, None, weight, eps, offset=offset)[1]
    if offset and weight is not None:
        weight = 1.0 + weight.float()
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # F.rms_norm would allocate a tensor for each of its nine operations.
    wide = x.float()
    wide.mul_(mean_square(wide).add_(eps).rsqrt_())
    return (wide if weight is None else wide.mul_(weight)).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gate_first: bool,
    kernels: Kernels,
) -> torch.Tensor:
    """Return rms_norm(x) * silu(gate), or with `gate_first` rms_norm(x * silu(gate)).

    x and gate are [T, N] or [T, H, N], with any strides of tokens and heads. The weight is [N], or
    [H, N] with a row for each head. It is computed in fp32 and rounded once. Qwen3-Next norms
    first (arXiv 2412.06464), Mamba-2 gates first (arXiv 2405.21060).
    """
    if kernels == "triton":
        from engine.kernels.triton.norm import gated_norm as launch

        return launch(x, gate, weight, eps, gate_first=gate_first)
    if kernels == "numba":
        from engine.kernels.numba.gated import gated_norm

        return gated_norm(x, gate, weight, eps, gate_first=gate_first)
    factor = silu(gate.float())
    wide = x.float() * factor if gate_first else x.float()
    normed = wide * (mean_square(wide) + eps).rsqrt() * weight.float()
    return (normed if gate_first else normed * factor).to(x.dtype)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares of each row [N], in fp32: [..., 1]."""
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1])


def divide_by_rms(
    x: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return x / rms * weight for the `mean_square` [..., 1] of rows that x [..., N] is a part of.

    It is computed in fp32.
    """
    return (x * (mean_square + eps).rsqrt() * weight).to(x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return (x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450).

    Without a bias, nothing is added.
    """
    if kernels == "triton":
        from engine.kernels.triton.norm import norm

        return norm(x, None, weight, bias, eps, mean=True)[1]
    if kernels == "numba":
        from engine.kernels.numba.rowwise import layer_norm as norm_rows

        return norm_rows(x, None, weight, bias, eps)[1]
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    post: torch.Tensor | None = None,
    kernels: Kernels,
) -> Tensors:
    """Return x + delta and its rms_norm. `post` is the weight of an rms_norm on delta first."""
    if kernels == "triton":
        from engine.kernels.triton.norm import norm

        return norm(x, delta, weight, None, eps, offset=offset, post=post)
    if post is not None:
        delta = rms_norm(delta, post, eps, offset=offset, kernels=kernels)
    if kernels == "numba":
        from engine.kernels.numba.rowwise import norm as norm_rows

        return norm_rows(x, delta, weight, eps, offset=offset)
    total = x + delta
    return total, rms_norm(total, weight, eps, offset=offset, kernels=kernels)


def add_layer_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    kernels: Kernels,
) -> Tensors:
    """Return x + delta and its layer_norm."""
    if kernels == "triton":
        from engine.kernels.triton.norm import norm

        return norm(x, delta, weight, bias, eps, mean=True)
    if kernels == "numba":
        from engine.kernels.numba.rowwise import layer_norm as norm_rows

        return norm_rows(x, delta, weight, bias, eps)
    total = x + delta
    return total, layer_norm(total, weight, bias, eps, kernels=kernels)
