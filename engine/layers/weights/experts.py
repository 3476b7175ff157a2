"""The weights of the experts of a layer, packed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from engine.checkpoint.parameters import Parameters
from engine.layers.weights.pack import experts_kernel, pack, pack_codes
from engine.layers.weights.packed import PackedForm
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.experts import ExpertRows, expert_by_expert, experts_linear
from engine.ops.kernels import Kernels
from engine.ops.quantize import Codes, stacked


class PackedExperts:
    """The packed weights [out, in] of each expert."""

    def __init__(self, weights: list[PackedForm], kernels: Kernels) -> None:
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


class ExpertsWeight(Weight):
    """The weights [out, in] of `count` experts, one below another."""

    def __init__(self, parameters: Parameters, sizes: Mapping[str, int], count: int) -> None:
        super().__init__(parameters, sizes)
        self._count = count
        self.packed_experts: PackedExperts | None = None

    @property
    def packed_bytes(self) -> int:
        return 0 if self.packed_experts is None else self.packed_experts.nbytes

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """Pack the weights of all experts and free the plain ones; irreversible."""
        weights: list[PackedForm] = []
        for values, bias in zip(self._of_experts(), self._biases(), strict=True):
            if isinstance(values, Codes):
                weights.append(pack_codes(values, bias))
                continue
            packed = pack(values, bias, kernels=kernels, quantization=quantization)
            if packed is not None:
                weights.append(packed)
        self.stored.clear()
        if weights:
            self.packed_experts = PackedExperts(weights, kernels)
            self._parameters["weight"] = None

    def multiply_rows(self, x: torch.Tensor, rows: ExpertRows, kernels: Kernels) -> torch.Tensor:
        """Return [P, out] for x [P, in]; both are sorted by expert."""
        if self.packed_experts is not None:
            return self.packed_experts(x, rows)
        weight = self.plain.unflatten(0, (self._count, -1))
        if x.is_meta and kernels != "triton":  # how many rows an expert has is unknown
            return x.new_empty(len(x), weight.shape[1])
        bias = self.bias
        if bias is not None:
            bias = bias.unflatten(0, (self._count, -1))
        return experts_linear(x, weight, bias, rows, kernels=kernels)

    @property
    def _outputs(self) -> int:
        """The outputs of one expert, on this rank."""
        return max(rows.stop for rows in self.slices.values()) // self._count

    def _of_experts(self) -> Iterator[torch.Tensor | Codes]:
        """Yield the weight [out, in] of each expert, or its codes."""
        if not self.stored:
            yield from self.plain.data.split(self._outputs)
            return
        assert self.stored_form is not None
        codes = [self.stored[part] for part in self.slices]
        parts = len(codes) // self._count
        for first in range(0, len(codes), parts):
            yield stacked(codes[first : first + parts]).in_form(self.stored_form)

    def _biases(self) -> Sequence[torch.Tensor | None]:
        bias = self.bias
        if bias is None:
            return [None] * self._count
        return bias.data.split(self._outputs)
