"""Quantised weights in rows, for GPUs. They are multiplied without being unpacked."""

from __future__ import annotations

import torch

from engine.ops.codes import CodeRows, Quantization, codes_linear
from engine.ops.kernels import Kernels
from engine.ops.quantize import Float8Codes, quantize

VALUES_AT_ONCE = 2**24  # of a weight that is rounded, to limit the memory of fp32 copies


class CodeRowsWeight:
    """A weight [out, in] as CodeRows, with its matmul and optional bias. `wide` returns fp32."""

    def __init__(
        self,
        weight: torch.Tensor,
        kind: Quantization,
        bias: torch.Tensor | None = None,
        *,
        kernels: Kernels,
        wide: bool = False,
    ) -> None:
        self.rows = code_rows(weight, kind)
        self._bias = bias
        self._kernels = kernels
        self._dtype = torch.float32 if wide else weight.dtype

    @property
    def nbytes(self) -> int:
        parts = self.rows.codes, self.rows.scales, self.rows.offsets
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return codes_linear(x, self.rows, self._bias, self._dtype, kernels=self._kernels)


def code_rows(weight: torch.Tensor, kind: Quantization) -> CodeRows:
    """Round a weight [out, in], some of its outputs at a time."""
    outputs, inputs = weight.shape
    count = max(1, VALUES_AT_ONCE // inputs)
    pieces = [_rounded(weight[first : first + count], kind) for first in range(0, outputs, count)]
    codes = torch.cat([piece.codes for piece in pieces])
    scales = torch.cat([piece.scales for piece in pieces])
    offsets = [piece.offsets for piece in pieces if piece.offsets is not None]
    return CodeRows(kind, inputs, codes, scales, torch.cat(offsets) if offsets else None)


def _rounded(weight: torch.Tensor, kind: Quantization) -> CodeRows:
    quantized = quantize(weight, kind)
    inputs = weight.shape[1]
    if isinstance(quantized, Float8Codes):
        return CodeRows(kind, inputs, quantized.codes.view(torch.uint8), quantized.scales, None)
    codes = quantized.codes
    if kind == "int4":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return CodeRows(kind, inputs, codes, quantized.scales, quantized.offsets)
