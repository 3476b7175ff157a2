"""How a layer keeps its weight on a CPU: in oneDNN's layout, or quantised."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.kernels.numba.call import GROUP, LANES
from engine.layers.weights.onednn import PackedWeight
from engine.ops.codes import BITS, SCALES, Quantization, quantise
from engine.ops.kernels import Kernels


class Weight(Protocol):
    """A weight [out, in] with its bias, in a form of its own."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    kernels: Kernels,
    wide: bool = False,
    quantization: Quantization | None = None,
) -> Weight:
    """Return the weight [out, in] packed for a CPU. With `wide` it may return fp32.

    A quantised weight without a kernel for this CPU or dtype is rounded, and kept in the dtype of
    `weight`. One whose inputs do not fill groups is not quantised.
    """
    if quantization is not None and weight.shape[1] % GROUP == 0:
        codes = quantise(weight, quantization)
        if has_kernel(weight.dtype, kernels):
            from engine.kernels.numba.codes import CodesLinear

            return CodesLinear(
                codes.codes, codes.scales, codes.offsets, codes.bits, bias, wide=wide
            )
        weight = codes.numbers().to(weight.dtype)
    return PackedWeight(weight, bias, kernels=kernels, wide=wide)


def has_kernel(dtype: torch.dtype, kernels: Kernels) -> bool:
    """Return whether quantised weights are multiplied as they are, on this CPU."""
    if kernels != "numba" or dtype != torch.bfloat16:
        return False
    from engine.kernels.numba.codes import has_instructions

    return has_instructions()


def head_quantization(quantization: Quantization | None) -> Quantization | None:
    """Return how a head is quantised: always with 8 bits, because logits need them."""
    return "int8" if quantization else None


def nbytes_of(
    outputs: int,
    inputs: int,
    is_head: bool,
    dtype: torch.dtype,
    kernels: Kernels,
    quantization: Quantization | None,
) -> int:
    """Return the bytes of a packed weight [outputs, inputs], with scales and padding."""
    kind = head_quantization(quantization) if is_head else quantization
    if kind is None or inputs % GROUP or not has_kernel(dtype, kernels):
        return outputs * inputs * dtype.itemsize
    rows = -(-outputs // LANES) * LANES
    return rows * (inputs * BITS[kind] // 8 + 2 * SCALES[kind] * inputs // GROUP)
