"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import Linear
from engine.ops.gated import gelu, gelu_tanh, gelu_tanh_mul, silu, silu_mul

Activation = Callable[[torch.Tensor], torch.Tensor]
# By the names configs have for them.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": silu,
    "swish": silu,
}
GATED = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202); the activation is a key of GATED."""

    def __init__(
        self, hidden: int, intermediate: int, activation: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, {"gate": intermediate, "up": intermediate}, bias=bias)
        self.gated = GATED[activation]
        self.down = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(self.gate_up(x)))
