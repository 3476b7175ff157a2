"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import Linear
from engine.ops.gated import gelu, gelu_tanh, gelu_tanh_mul, silu, silu_mul

Activation = Callable[[torch.Tensor], torch.Tensor]
# Keys are the names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": silu,
    "swish": silu,
}
GATED = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


class MLP(nn.Module):
    """down(activation(up(x))). A gated activation takes two `parts` of the output of `up`."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: Activation,
        *,
        parts: Sequence[str] = ("",),
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.up = Linear(hidden, dict.fromkeys(parts, intermediate), bias=bias)
        self.activation = activation
        self.down = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202); the activation is a key of GATED."""

    def __init__(
        self, hidden: int, intermediate: int, activation: str, *, bias: bool = False
    ) -> None:
        super().__init__(hidden, intermediate, GATED[activation], parts=("gate", "up"), bias=bias)
