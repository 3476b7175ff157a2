"""Activations of feed-forward layers and gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.dispatch import compiled_for, kernels_for


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where [..., 2F] holds gate and up side by side; [..., F] (SwiGLU)."""
    if kernels_for(gate_up):
        from engine.kernels.gated import activate

        return activate(gate_up, "silu", gated=True)
    if compiled_for(gate_up):
        from engine.kernels.cpu.rows import activate as activate_rows

        return activate_rows(gate_up, "silu")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up, laid out as for silu_mul (GeGLU, arXiv 2002.05202)."""
    if kernels_for(gate_up):
        from engine.kernels.gated import activate

        return activate(gate_up, "gelu_tanh", gated=True)
    if compiled_for(gate_up):
        from engine.kernels.cpu.rows import activate as activate_rows

        return activate_rows(gate_up, "gelu_tanh")
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU, called gelu_new by GPT-2's config (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared (Primer, arXiv 2109.08668)."""
    if kernels_for(x):
        from engine.kernels.gated import activate

        return activate(x, "relu_squared", gated=False)
    return F.relu(x).square()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), computed in fp32.

    By tanh: torch's own sigmoid rounds the last elements of an fp32 tensor on a CPU differently,
    so that a token's gate would depend on how many tokens share the step.
    """
    return (0.5 * torch.tanh(0.5 * x.float()) + 0.5).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the normal distribution function of x, exact by erf (arXiv 1606.08415)."""
    return F.gelu(x)
