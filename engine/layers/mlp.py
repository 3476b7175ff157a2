"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import Linear
from engine.ops.gated import (
    gelu_mul,
    gelu_tanh_mul,
    plain_gelu,
    plain_gelu_tanh,
    quick_gelu,
    relu_squared,
    silu,
    silu_mul,
)
from engine.ops.kernels import Kernels

# A function from [..., N] to [..., N], or to [..., N / 2] if it is gated.
Activation = Callable[[torch.Tensor, Kernels], torch.Tensor]


def in_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation:
    """Return `function`, for which there is no kernel, as an Activation."""
    return lambda x, kernels: function(x)


# Keys are the names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": plain_gelu,
    "gelu_fast": plain_gelu_tanh,
    "gelu_new": plain_gelu_tanh,
    "gelu_pytorch_tanh": plain_gelu_tanh,
    "quick_gelu": in_torch(quick_gelu),
    "relu": in_torch(F.relu),
    "relu2": relu_squared,
    "silu": in_torch(silu),
    "swish": in_torch(silu),
}
GATED: dict[str, Activation] = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}
GATED_OF_ENCODERS: dict[str, Activation] = GATED | {"gelu": gelu_mul}


class MLP(nn.Module):
    """down(activation(up(x))). A gated activation takes two `parts` of the output of `up`.

    `bias` is whether both linears have one. `down_bias` says so of `down` alone. `linear` is the
    class of both.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: Activation,
        *,
        parts: Sequence[str] = ("",),
        bias: bool = False,
        down_bias: bool | None = None,
        linear: type[Linear] = Linear,
    ) -> None:
        super().__init__()
        sizes = dict.fromkeys(parts, intermediate)
        self.up = linear(hidden, sizes, bias=bias, output_units=sizes)
        self.activation = activation
        down_bias = bias if down_bias is None else down_bias
        self.down = linear(intermediate, hidden, bias=down_bias, input_units=intermediate)
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x), self.kernels))


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202); the activation is a key of GATED."""

    def __init__(
        self, hidden: int, intermediate: int, activation: str, *, bias: bool = False
    ) -> None:
        super().__init__(hidden, intermediate, GATED[activation], parts=("gate", "up"), bias=bias)
