"""Activation functions of feed-forward layers, plain and gated."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.device.facts import emulates_bf16
from engine.ops.kernels import Kernels


def silu_mul(gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return silu(gate) * up [..., F], for gate and up concatenated in [..., 2F] (SwiGLU)."""
    return _gated(gate_up, "silu", silu, kernels)


def gelu_mul(gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return gelu(gate) * up, with the layout of silu_mul. Triton has no kernel for it."""
    return _gated(gate_up, "gelu", gelu, "torch" if kernels == "triton" else kernels)


def gelu_tanh_mul(gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return gelu_tanh(gate) * up, with the layout of silu_mul (GeGLU, arXiv 2002.05202)."""
    return _gated(gate_up, "gelu_tanh", gelu_tanh, kernels)


def plain_gelu(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return gelu(x) [..., N]; only Numba has a kernel."""
    return _plain(x, "gelu", gelu, kernels)


def plain_gelu_tanh(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return gelu_tanh(x) [..., N]; only Numba has a kernel."""
    return _plain(x, "gelu_tanh", gelu_tanh, kernels)


def _plain(
    x: torch.Tensor,
    kind: str,
    activation: Callable[[torch.Tensor], torch.Tensor],
    kernels: Kernels,
) -> torch.Tensor:
    if kernels == "numba":
        from engine.kernels.numba.rowwise import activate

        return activate(x, kind, gated=False)
    return activation(x)


def _gated(
    gate_up: torch.Tensor,
    kind: str,
    activation: Callable[[torch.Tensor], torch.Tensor],
    kernels: Kernels,
) -> torch.Tensor:
    if kernels == "triton":
        from engine.kernels.triton.gated import activate

        return activate(gate_up, kind, gated=True)
    if kernels == "numba":
        from engine.kernels.numba.rowwise import activate as activate_rows

        return activate_rows(gate_up, kind, gated=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def clamped_swiglu(gate_up: torch.Tensor, limit: float, sharpness: float) -> torch.Tensor:
    """Return (up + 1) * gate * sigmoid(sharpness * gate) [..., F], for [..., 2F] in turns.

    Gate is clamped from above and up from both sides, as in gpt-oss (arXiv 2508.10925). It is
    computed in fp32.
    """
    gate, up = gate_up.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    share = sigmoid(gate * sharpness)
    return ((up + 1) * gate * share).to(gate_up.dtype)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return x * sigmoid(gate), for attention outputs (arXiv 2505.06708), computed in fp32.

    x and gate are [T, N] or [T, H, N], with any strides of tokens and heads.
    """
    if kernels == "triton":
        from engine.kernels.triton.gated import sigmoid_mul as launch

        return launch(x, gate)
    if kernels == "numba":
        from engine.kernels.numba.gated import sigmoid_mul as multiply

        return multiply(x, gate)
    return (x.float() * sigmoid(gate.float())).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + exp(-x)) (arXiv 1702.03118)."""
    if not _splits_change_bits(x):
        return F.silu(x)
    return x / (-x).exp_().add_(1.0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x times the standard normal CDF of x (arXiv 1606.08415)."""
    # On such a CPU oneDNN has GELU in fp32 only. With it, an element's bits do not depend on its
    # place in the tensor.
    if emulates_bf16(x.device, x.dtype):
        return F.gelu(x.float()).to(x.dtype)
    return F.gelu(x.contiguous())  # oneDNN's takes no rows with gaps


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of GELU, "gelu_new" in GPT-2's config (arXiv 1606.08415)."""
    if not _splits_change_bits(x):
        # Between -5.17 and -5.05 torch gives 0 or -1.5e-7, depending on the place in a thread's
        # piece of the tensor.
        if x.device.type == "cpu":
            x = F.threshold(x, -5.05, 0.0)
        return F.gelu(x, approximate="tanh")
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x)
    return x / inner.mul_(-2 * math.sqrt(2 / math.pi)).exp_().add_(1.0)


def _splits_change_bits(x: torch.Tensor) -> bool:
    """Return whether torch's silu, gelu_tanh and sigmoid depend on an element's place in `x`.

    In fp32 on a CPU, elements at the end of a thread's piece of the tensor get different bits. They
    would then depend on the number of tokens in the step. torch's exp and tanh are not affected.
    """
    return x.dtype == torch.float32 and x.device.type == "cpu"


def relu_squared(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return max(x, 0) squared (Primer, arXiv 2109.08668)."""
    if kernels == "triton":
        from engine.kernels.triton.gated import activate

        return activate(x, "relu_squared", gated=False)
    return F.relu(x).square()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x)), computed in fp32.

    It uses tanh, because torch.sigmoid has the problem of `_splits_change_bits`.
    """
    return (0.5 * torch.tanh(0.5 * x.float()) + 0.5).to(x.dtype)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x), CLIP's approximation of GELU."""
    return x * sigmoid(1.702 * x)
