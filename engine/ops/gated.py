"""Activations of the feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where [..., 2F] holds gate and up side by side; [..., F] (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up, laid out as for silu_mul (GeGLU, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU, called gelu_new by GPT-2's config (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")
