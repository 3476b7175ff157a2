"""Mixture of experts: a router chooses a few feed-forward networks for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.layers.linear import Linear
from engine.layers.mlp import GATED
from engine.layers.weights.pack import Weight, experts_kernel, pack, pack_codes
from engine.ops.codes import Quantization
from engine.ops.experts import (
    ExpertRows,
    combine,
    expert_by_expert,
    experts_linear,
    route,
    rows_by_expert,
)
from engine.ops.kernels import Kernels
from engine.ops.quantise import stacked


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of a mixture of experts, and how its router weighs them."""

    count: int
    per_token: int
    intermediate: int
    renormalises: bool  # the weights of a token's experts add up to 1
    parts: tuple[str, str, str] = ("gate", "up", "down")  # their names in a checkpoint


class ExpertWeights:
    """The packed weights [out, in] of each expert."""

    def __init__(self, weights: list[Weight], kernels: Kernels) -> None:
        self.weights = weights
        self._together = experts_kernel(weights, kernels)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """x [P, in] -> [P, out]."""
        if self._together is not None:
            return self._together(x, rows.starts)
        return expert_by_expert(x, self.weights, rows)


class ExpertLinear(Linear):
    """Linear layers [in, out] of `count` experts.

    `parts` names the slices of an expert's outputs that come from different checkpoint tensors. A
    part of expert e is called "e.part". Ranks share the inputs of each expert, or its outputs.
    """

    def __init__(
        self, count: int, in_features: int, parts: dict[str, int], *, shares_inputs: bool = False
    ) -> None:
        sizes = {f"{e}.{part}": size for e in range(count) for part, size in parts.items()}
        super().__init__(
            in_features,
            sizes,
            output_units=None if shares_inputs else sizes,
            input_units=in_features if shares_inputs else None,
        )
        self.count = count
        self._experts: ExpertWeights | None = None

    def prepack(self, quantization: Quantization | None = None) -> None:
        """Pack the weights of all experts and free the plain ones; irreversible. See `pack`."""
        if self._stored:
            assert self.stored_form is not None
            codes = [self._stored[part].kept_in(self.stored_form) for part in self.parts]
            self._stored.clear()
            per_expert = len(codes) // self.count
            groups = [codes[i : i + per_expert] for i in range(0, len(codes), per_expert)]
            packed: list[Weight | None] = [pack_codes(stacked(parts), None) for parts in groups]
        else:
            assert self.weight is not None
            packed = [
                pack(weight, None, kernels=self.kernels, quantization=quantization)
                for weight in self.weight.data.split(len(self.weight) // self.count)
            ]
        weights = [weight for weight in packed if weight is not None]
        if weights:
            self._experts = ExpertWeights(weights, self.kernels)
            self.weight = None

    @property
    def packed_bytes(self) -> int:
        return 0 if self._experts is None else self._experts.nbytes

    # Unlike those of other layers, a row's weight depends on `rows`.
    def forward(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:  # type: ignore[override]
        """Return [P, out] for x [P, in]; both are sorted by expert. See also `summed`."""
        if self._experts is not None:
            return self._experts(x, rows)
        assert self.weight is not None
        weight = self.weight.unflatten(0, (self.count, -1))
        if x.is_meta and self.kernels != "triton":  # how many rows an expert has is unknown
            return x.new_empty(len(x), weight.shape[1])
        return experts_linear(x, weight, rows, kernels=self.kernels)


class Experts(nn.Module):
    """Feed-forward networks [hidden] -> [hidden]. Each token uses a few of them.

    Computes the sum of weight(e) * down(activation(gate(x)) * up(x)) over the experts e of a token.
    `activation` is a key of GATED.
    """

    def __init__(self, hidden: int, shape: ExpertsShape, activation: str) -> None:
        super().__init__()
        gate, up, down = shape.parts
        size = shape.intermediate
        self.shape = shape
        self.activation = GATED[activation]
        self.router = Linear(hidden, shape.count, is_rounded=False)
        self.expert_up = ExpertLinear(shape.count, hidden, {gate: size, up: size})
        self.expert_down = ExpertLinear(shape.count, size, {down: hidden}, shares_inputs=True)
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        experts, weights = route(self.router(x), shape.per_token, renormalises=shape.renormalises)
        rows = rows_by_expert(experts, shape.count)
        up = self.expert_up(x.index_select(0, rows.tokens), rows)
        down = self.expert_down(self.activation(up, self.kernels), rows)
        return self.expert_down.summed(combine(down, rows, weights))
