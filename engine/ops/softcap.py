"""Softcap: a smooth bound on logits (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

import torch


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) in fp32: near zero x itself, never beyond the cap."""
    return torch.tanh(x.float() / cap) * cap
