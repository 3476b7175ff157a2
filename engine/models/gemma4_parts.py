"""Parts that only some checkpoints of Gemma 4 have: inputs per layer, and experts."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.embedding import ScaledTokenEmbedding
from engine.layers.experts import Experts, ExpertsShape
from engine.layers.linear import Linear
from engine.layers.mlp import GATED
from engine.layers.norm import PlainRMSNorm, RMSNorm
from engine.ops.experts import route
from engine.ops.kernels import Kernels


class PerLayerInputs(nn.Module):
    """The inputs of size `size` that each layer has for a token (transformers' Gemma4TextModel).

    They are the mean of a projected token embedding and a second embedding, times sqrt(2).
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        size: int,
        hidden: int,
        norm_eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.shape = (layers, size)
        self.scale = hidden**-0.5
        self.embed = ScaledTokenEmbedding(
            vocab_size, layers * size, size**0.5, dtype, divisible=True
        )
        self.project = Linear(hidden, layers * size)
        self.norm = RMSNorm(size, norm_eps)

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """ids [T], their token embeddings [T, hidden] -> [T, layers, size]."""
        projected = (self.project(embedded) * self.scale).unflatten(1, self.shape)
        second = self.embed(ids).unflatten(1, self.shape)
        return (self.norm(projected) + second) * 2**-0.5


class PerLayerGate(nn.Module):
    """leave(activation(enter(x)) * inputs), for the `size` inputs that a layer has for a token."""

    def __init__(self, hidden: int, size: int, activation: str) -> None:
        super().__init__()
        self.enter = Linear(hidden, size)
        self.activation = GATED[activation]
        self.leave = Linear(size, hidden)
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], inputs [T, size] -> [T, hidden]."""
        gate_up = torch.cat((self.enter(x), inputs), dim=1)
        return self.leave(self.activation(gate_up, self.kernels))


class RouterScales(nn.Module):
    """The learned factors around a router: on its inputs, and on each expert's weight."""

    def __init__(self, hidden: int, experts: int, eps: float) -> None:
        super().__init__()
        self.norm = PlainRMSNorm(eps)
        self.root = hidden**-0.5
        self.scale = nn.Parameter(torch.empty(hidden))
        self.per_expert_scale = nn.Parameter(torch.empty(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs [T, hidden] of the router, for the residual stream."""
        return self.norm(x) * self.scale * self.root


class AddedMixture(nn.Module):
    """A mixture of experts whose normed output is added to that of a dense MLP.

    Router and experts read the residual stream, each with a norm of its own.
    """

    def __init__(self, hidden: int, shape: ExpertsShape, activation: str, eps: float) -> None:
        super().__init__()
        self.dense_norm = RMSNorm(hidden, eps)
        self.scales = RouterScales(hidden, shape.count, eps)
        self.norm = RMSNorm(hidden, eps)
        self.experts = Experts(hidden, shape, activation)
        self.post_norm = RMSNorm(hidden, eps)

    def forward(self, dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, hidden], for the MLP's output `dense` and the residual stream x."""
        shape = self.experts.shape
        logits = self.experts.router(self.scales(x))
        chosen, weights = route(logits, shape.per_token, renormalises=shape.renormalises)
        weights = weights * self.scales.per_expert_scale[chosen]
        mixed = self.experts.mix(self.norm(x), chosen, weights)
        return self.dense_norm(dense) + self.post_norm(mixed)
