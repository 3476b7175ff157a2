"""Mixture of experts: a router chooses a few feed-forward networks for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.layers.linear import Linear
from engine.layers.mlp import GATED
from engine.layers.weights.pack import experts_kernel, pack, pack_codes
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.experts import (
    ExpertRows,
    combine,
    expert_by_expert,
    experts_linear,
    route,
    rows_by_expert,
)
from engine.ops.gated import clamped_swiglu
from engine.ops.kernels import Kernels
from engine.ops.quantize import Codes, stacked


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The activation of gpt-oss's experts, whose gate and up take turns. See `clamped_swiglu`."""

    limit: float
    sharpness: float

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return clamped_swiglu(x, self.limit, self.sharpness)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of a mixture of experts, and how its router weighs them."""

    count: int
    per_token: int
    intermediate: int
    renormalises: bool  # the weights of a token's experts add up to 1
    # The names of each expert's gate, up and down in a checkpoint. None: all experts' gates and ups
    # are one tensor, and their downs another one.
    parts: tuple[str, str, str] | None = ("gate", "up", "down")
    bias: bool = False  # of router and experts
    activation: ClampedSwiGLU | None = None  # None: the model's


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

    `outputs` are those of an expert. If it is a number, one checkpoint tensor has all experts, and
    expert e is part "e". Else it names the slices that come from different tensors, which are the
    parts "e.name".

    Ranks may share the outputs of each part in `output_units` equal units, or the inputs.
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        outputs: int | dict[str, int],
        *,
        bias: bool = False,
        output_units: int | None = None,
        input_units: int | None = None,
    ) -> None:
        self.count = count
        if isinstance(outputs, int):
            sizes = {str(e): outputs for e in range(count)}
        else:
            sizes = {f"{e}.{part}": size for e in range(count) for part, size in outputs.items()}
        units = None if output_units is None else dict.fromkeys(sizes, output_units)
        super().__init__(in_features, sizes, bias=bias, output_units=units, input_units=input_units)
        self._experts: ExpertWeights | None = None

    def prepack(self, quantization: Quantization | None = None) -> None:
        """Pack the weights of all experts and free the plain ones; irreversible. See `pack`."""
        packed: list[Weight | None] = []
        for weight, bias in zip(self._of_experts(), self._biases(), strict=True):
            if isinstance(weight, Codes):
                packed.append(pack_codes(weight, bias))
                continue
            kernels = self.kernels
            packed.append(pack(weight, bias, kernels=kernels, quantization=quantization))
        self._stored.clear()
        weights = [weight for weight in packed if weight is not None]
        if weights:
            self._experts = ExpertWeights(weights, self.kernels)
            self.weight = None

    @property
    def _outputs(self) -> int:
        """The outputs of one expert, on this rank."""
        return max(rows.stop for rows in self.parts.values()) // self.count

    def _of_experts(self) -> Iterator[torch.Tensor | Codes]:
        """Yield the weight [out, in] of each expert, or its codes."""
        if not self._stored:
            assert self.weight is not None
            yield from self.weight.data.split(self._outputs)
            return
        assert self.stored_form is not None
        codes = [self._stored[part] for part in self.parts]
        of_expert = len(codes) // self.count
        for first in range(0, len(codes), of_expert):
            yield stacked(codes[first : first + of_expert]).kept_in(self.stored_form)

    @property
    def _added_bias(self) -> torch.Tensor | None:
        """The biases, which one rank adds: experts are weighed before the ranks are summed."""
        if self._ranks is not None and self._ranks.own > 0:
            return None
        return self.bias

    def _biases(self) -> Sequence[torch.Tensor | None]:
        bias = self._added_bias
        if bias is None:
            return [None] * self.count
        return bias.data.split(self._outputs)

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
        bias = self._added_bias
        if bias is not None:
            bias = bias.unflatten(0, (self.count, -1))
        return experts_linear(x, weight, bias, rows, kernels=self.kernels)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products, if they share the inputs."""
        return product if self._ranks is None else self._ranks.sum(product)


class Experts(nn.Module):
    """Feed-forward networks [hidden] -> [hidden]. Each token uses a few of them.

    Computes the sum of weight(e) * down(activation(gate(x)) * up(x)) over the experts e of a token.
    `activation` is a key of GATED, unless the shape has its own.
    """

    def __init__(self, hidden: int, shape: ExpertsShape, activation: str) -> None:
        super().__init__()
        size = shape.intermediate
        ups: int | dict[str, int] = 2 * size
        downs: int | dict[str, int] = hidden
        if shape.parts is not None:
            gate, up, down = shape.parts
            ups = {gate: size, up: size}
            downs = {down: hidden}
        self.shape = shape
        self.activation = shape.activation or GATED[activation]
        self.router = Linear(hidden, shape.count, bias=shape.bias, is_rounded=False)
        # A unit is a gate and its up where they take turns in one tensor, else one of them.
        self.expert_up = ExpertLinear(shape.count, hidden, ups, bias=shape.bias, output_units=size)
        self.expert_down = ExpertLinear(shape.count, size, downs, bias=shape.bias, input_units=size)
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        experts, weights = route(self.router(x), shape.per_token, renormalises=shape.renormalises)
        rows = rows_by_expert(experts, shape.count)
        up = self.expert_up(x.index_select(0, rows.tokens), rows)
        down = self.expert_down(self.activation(up, self.kernels), rows)
        return self.expert_down.summed(combine(down, rows, weights))
