"""Mixture of experts: a router chooses a few feed-forward networks for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.device.ranks import Ranks
from engine.layers.linear import Linear
from engine.layers.mlp import GATED, GatedMLP
from engine.layers.weights.experts import ExpertsWeight
from engine.ops.experts import TINY, ExpertGroups, ExpertRows, combine, route, rows_by_expert
from engine.ops.gated import clamped_swiglu, sigmoid
from engine.ops.kernels import Kernels


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The activation of gpt-oss's experts, whose gate and up take turns. See `clamped_swiglu`."""

    limit: float
    sharpness: float

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return clamped_swiglu(x, self.limit, self.sharpness)


@dataclass(frozen=True, slots=True)
class RouterShape:
    """How a router scores experts, in addition to the settings in ExpertsShape; see `route`."""

    is_sigmoid: bool = False
    has_choice_bias: bool = False
    groups: ExpertGroups | None = None
    scale: float = 1.0
    is_wide: bool = False  # computed and kept in fp32
    eps: float = TINY  # added to the sum that renormalised weights are divided by


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A network that every token uses; its output is added to that of the token's experts.

    If it is gated, a learned score of the token weighs the output by its sigmoid. Several shared
    experts without gates are one network: their `intermediate` is the sum.
    """

    intermediate: int
    is_gated: bool = False


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
    shared: SharedExpert | None = None
    router: RouterShape = RouterShape()


class WideRouter(Linear):
    """A router in fp32 in a model of any dtype. The bias corrects scores for the choice alone."""

    takes_adapters = False

    def __init__(self, hidden: int, count: int, *, has_choice_bias: bool) -> None:
        super().__init__(hidden, count, is_rounded=False)
        self.tensors.dtype = torch.float32
        self.e_score_correction_bias: nn.Parameter | None = None
        if has_choice_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class ExpertLinear(Linear):
    """Linear layers [in, out] of `count` experts.

    `outputs` are those of an expert. If it is a number, one checkpoint tensor has all experts, and
    expert e is part "e". Else it names the slices that come from different tensors, which are the
    parts "e.name".

    Ranks may divide the outputs of each part in `output_units` equal units, or the inputs.
    """

    takes_adapters = False

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
        self.tensors: ExpertsWeight = ExpertsWeight(self._parameters, sizes, count)

    def divide(self, ranks: Ranks) -> None:
        super().divide(ranks)
        # One rank adds the biases: experts are weighed before the ranks are summed.
        self.tensors.adds_bias = self._ranks is None or ranks.own == 0

    # Unlike those of other layers, a row's weight depends on `rows`.
    def forward(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:  # type: ignore[override]
        """Return [P, out] for x [P, in]; both are sorted by expert. See also `summed`."""
        return self.tensors.multiply_rows(x, rows, self.kernels)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products, if they divide the inputs."""
        return product if self._ranks is None else self._ranks.sum(product)


class Experts(nn.Module):
    """Feed-forward networks [hidden] -> [hidden]. Each token uses a few of them.

    Computes the sum of weight(e) * down(activation(gate(x)) * up(x)) over the experts e of a token.
    `activation` is a key of GATED, unless the shape has its own. A shared expert is added to the
    sum.
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
        self.router = _router(hidden, shape)
        # A unit is a gate and its up where they take turns in one tensor, else one of them.
        self.expert_up = ExpertLinear(shape.count, hidden, ups, bias=shape.bias, output_units=size)
        self.expert_down = ExpertLinear(shape.count, size, downs, bias=shape.bias, input_units=size)
        self.shared: GatedMLP | None = None
        self.shared_gate: Linear | None = None
        if shape.shared is not None:
            self.shared = GatedMLP(hidden, shape.shared.intermediate, activation)
            if shape.shared.is_gated:
                self.shared_gate = Linear(hidden, 1, is_rounded=False)
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        chosen = self._chosen(x)
        if self.shared is None:
            return chosen
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = sigmoid(self.shared_gate(x)) * shared
        return chosen + shared

    def _chosen(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, hidden]."""
        shape = self.shape
        router = shape.router
        experts, weights = route(
            self.router(x),
            shape.per_token,
            renormalises=shape.renormalises,
            is_sigmoid=router.is_sigmoid,
            bias=getattr(self.router, "e_score_correction_bias", None),
            groups=router.groups,
            scale=router.scale,
            eps=router.eps,
        )
        return self.mix(x, experts, weights)

    def mix(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [T, hidden] of the chosen `experts` [T, k] of each token."""
        rows = rows_by_expert(experts, self.shape.count)
        up = self.expert_up(x.index_select(0, rows.tokens), rows)
        down = self.expert_down(self.activation(up, self.kernels), rows)
        return self.expert_down.summed(combine(down, rows, weights))


def _router(hidden: int, shape: ExpertsShape) -> Linear:
    if shape.router.is_wide:
        assert not shape.bias
        return WideRouter(hidden, shape.count, has_choice_bias=shape.router.has_choice_bias)
    return Linear(hidden, shape.count, bias=shape.bias, is_rounded=False)
