"""Linear layer with a quantised weight, whose codes lie in rows as a GPU reads them.

The numbers that the codes stand for are rounded to the dtype of x, and multiplied.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from engine.kernels.numba.call import GROUP
from engine.ops.kernels import Kernels
from engine.ops.linear import linear

Quantization = Literal["int8", "int4", "fp8"]
# Inputs that share a scale.
GROUPS: dict[Quantization, int] = {"int8": GROUP, "int4": GROUP, "fp8": 128}


class CodeRows(NamedTuple):
    """A weight [out, in]: code * scale + offset.

    A byte of `codes` is an input: of `int8` its code plus 128, of `fp8` its e4m3 number. A byte of
    `int4` is an even input in the lower four bits, and the next input in the upper ones.
    """

    kind: Quantization
    inputs: int
    codes: torch.Tensor  # uint8 [out, in], of int4 [out, in / 2]
    scales: torch.Tensor  # [out, groups], fp16, of fp8 fp32
    offsets: torch.Tensor | None  # like scales; of int4 only

    def dequantize(self) -> torch.Tensor:
        """Return the weight [out, in] in fp32."""
        if self.kind == "fp8":
            values = self.codes.view(torch.float8_e4m3fn).float()
        elif self.kind == "int4":
            values = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).float()
        else:
            values = self.codes.float() - 128
        values = values * self._by_input(self.scales)
        return values if self.offsets is None else values + self._by_input(self.offsets)

    def _by_input(self, by_group: torch.Tensor) -> torch.Tensor:
        repeated = by_group.float().repeat_interleave(GROUPS[self.kind], 1)
        return repeated[:, : self.inputs]


def codes_linear(
    x: torch.Tensor,
    weight: CodeRows,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return x W^T + b [T, out], for x [T, in]. `dtype` defaults to x's."""
    if kernels == "triton":
        from engine.kernels.triton.codes import multiply_codes

        return multiply_codes(
            x,
            weight.codes,
            weight.scales,
            weight.offsets,
            bias,
            dtype or x.dtype,
            kind=weight.kind,
            group=GROUPS[weight.kind],
        )
    return linear(x, weight.dequantize().to(x.dtype), bias, dtype, kernels=kernels)
