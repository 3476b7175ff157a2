"""How a layer keeps its weight: plain, in oneDNN's layout, or quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.kernels.numba.call import LANES
from engine.layers.weights.code_rows import CodeRowsWeight
from engine.layers.weights.head import HeadWeight, has_head_kernel, head_nbytes
from engine.layers.weights.onednn import PackedWeight
from engine.layers.weights.packed import PackedForm
from engine.ops.codes import GROUPS, Quantization
from engine.ops.kernels import Kernels
from engine.ops.quantize import (
    BITS,
    SCALE_BYTES,
    Codes,
    CodesForm,
    is_quantized,
    quantize,
)

if TYPE_CHECKING:
    from engine.kernels.numba.experts import ExpertsMultiply, LayerKernel


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    kernels: Kernels,
    is_head: bool = False,
    quantization: Quantization | None = None,
) -> PackedForm | None:
    """Return the weight [out, in] packed, or None if it stays plain. A head returns fp32.

    Without a kernel for the device or dtype, a quantised weight is rounded and keeps its dtype.
    """
    inputs = weight.shape[1]
    if not is_packed(inputs, is_head, kernels, quantization):
        return None
    kind = kind_of(inputs, is_head, quantization)
    if kind is not None:
        assert quantization is not None
        has_codes = has_kernel(quantization, weight.dtype, kernels)
        if has_codes and kernels == "triton":
            return CodeRowsWeight(weight, kind, bias, kernels=kernels, wide=is_head)
        codes = quantize(weight, kind)
        if has_codes:
            assert isinstance(codes, Codes)
            return pack_codes(codes, bias, is_head=is_head)
        weight = codes.dequantize().to(weight.dtype)
    if is_head and weight.dtype != torch.float32:
        return HeadWeight(weight, kernels=kernels)
    return PackedWeight(weight, bias, kernels=kernels)


def pack_codes(codes: Codes, bias: torch.Tensor | None, *, is_head: bool = False) -> PackedForm:
    """Return the codes as Numba's kernel multiplies them. A head returns fp32."""
    from engine.kernels.numba.codes import CodesLinear

    return CodesLinear(codes.codes, codes.scales, codes.offsets, codes.bits, bias, wide=is_head)


def experts_kernel(weights: Sequence[PackedForm], kernels: Kernels) -> ExpertsMultiply | None:
    """Return a kernel for the packed weights of all experts, or None if each one goes alone."""
    if kernels != "numba":
        return None
    from engine.kernels.numba.codes import CodesLinear
    from engine.kernels.numba.experts import ExpertsMultiply

    layers: list[LayerKernel] = []
    for weight in weights:
        if isinstance(weight, PackedWeight) and weight.any_rows is not None:
            layers.append(weight.any_rows)
        elif isinstance(weight, CodesLinear):
            layers.append(weight)
        else:
            return None
    return ExpertsMultiply(layers)


def keeps_stored_codes(dtype: torch.dtype, kernels: Kernels) -> bool:
    """Return whether codes of a checkpoint can be multiplied as they are, on this device."""
    return kernels == "numba" and has_kernel("int8", dtype, kernels)


def has_kernel(quantization: Quantization, dtype: torch.dtype, kernels: Kernels) -> bool:
    """Return whether quantised weights are multiplied as they are, on this device."""
    if kernels == "triton":
        return True
    if kernels != "numba" or dtype != torch.bfloat16 or quantization == "fp8":
        return False
    from engine.kernels.numba.codes import has_instructions

    return has_instructions()


def is_packed(
    inputs: int, is_head: bool, kernels: Kernels, quantization: Quantization | None
) -> bool:
    """Return whether `pack` packs this weight: on a GPU, only if it is quantised."""
    return kernels != "triton" or kind_of(inputs, is_head, quantization) is not None


def gives_rows(
    inputs: int,
    dtype: torch.dtype,
    kernels: Kernels,
    quantization: Quantization | None,
) -> bool:
    """Return whether a head with these inputs, whose plain values are packed, is a RowsForm.

    Codes of a checkpoint are if they are exact.
    """
    is_rounded = kind_of(inputs, True, quantization) is not None
    return not is_rounded and has_head_kernel(inputs, dtype, kernels)


def kind_of(inputs: int, is_head: bool, quantization: Quantization | None) -> Quantization | None:
    """Return how a weight is quantised, if at all: a head as int8, because logits need it."""
    if quantization is None:
        return None
    kind: Quantization = "int8" if is_head else quantization
    return kind if is_quantized(inputs, kind) else None


def nbytes_of(
    outputs: int,
    inputs: int,
    is_head: bool,
    dtype: torch.dtype,
    kernels: Kernels,
    quantization: Quantization | None,
    stored_form: CodesForm | None = None,
    *,
    has_bias: bool = False,
) -> int:
    """Return the bytes of a packed weight [outputs, inputs], with scales and padding."""
    if stored_form is not None:
        return stored_form.nbytes(-(-outputs // LANES) * LANES, inputs)
    kind = kind_of(inputs, is_head, quantization)
    if quantization is None or kind is None or not has_kernel(quantization, dtype, kernels):
        is_narrow_head = is_head and dtype != torch.float32
        if is_narrow_head:
            return head_nbytes(outputs, inputs, dtype, kernels)
        if kernels == "numba":
            from engine.kernels.numba.linear import PANEL, packs_padded

            if packs_padded(outputs, inputs, dtype, has_bias=has_bias):
                outputs = -(-outputs // PANEL) * PANEL
        return outputs * inputs * dtype.itemsize
    panel = LANES if kernels == "numba" else 1
    rows = -(-outputs // panel) * panel
    groups = -(-inputs // GROUPS[kind])
    return rows * (inputs * BITS[kind] // 8 + SCALE_BYTES[kind] * groups)
