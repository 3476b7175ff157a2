"""The weight of an LM head on a CPU, whose products are fp32 for any number of rows.

oneDNN returns the dtype of the inputs: logits of a bf16 weight would be rounded to 8 bits.
"""

from __future__ import annotations

from typing import cast

import torch

from engine.layers.weights.onednn import PackedWeight
from engine.layers.weights.packed import PackedForm, RowsForm
from engine.ops.kernels import Kernels


class HeadWeight:
    """A weight [vocabulary, hidden] in 16 bits, with its matmul.

    Our own kernel multiplies bf16 numbers. Where it cannot run, the weight is kept in fp32.
    """

    def __init__(self, weight: torch.Tensor, *, kernels: Kernels) -> None:
        self._vocab_size, hidden = weight.shape
        self._is_fp32 = not has_head_kernel(hidden, weight.dtype, kernels)
        self._product: PackedForm
        if self._is_fp32:
            self._product = PackedWeight(weight.float())
            return
        from engine.kernels.numba.linear import head_multiply

        self._product = head_multiply(weight)

    @property
    def nbytes(self) -> int:
        return self._product.nbytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [T, hidden] of the weight. Our own kernel must multiply it."""
        return cast(RowsForm, self._product).rows(ids)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, vocabulary], fp32."""
        return self._product(x.float() if self._is_fp32 else x)[:, : self._vocab_size]


def has_head_kernel(hidden: int, dtype: torch.dtype, kernels: Kernels) -> bool:
    """Return whether our own kernel multiplies a head with this number of inputs here."""
    if kernels != "numba":
        return False
    from engine.kernels.numba.linear import can_multiply_head

    return can_multiply_head(hidden, dtype)


def head_nbytes(vocab_size: int, hidden: int, dtype: torch.dtype, kernels: Kernels) -> int:
    """Return the bytes of a head's weight, with padding."""
    if not has_head_kernel(hidden, dtype, kernels):
        return vocab_size * hidden * torch.float32.itemsize
    from engine.kernels.numba.linear import HEAD_PANEL

    return -(-vocab_size // HEAD_PANEL) * HEAD_PANEL * hidden * dtype.itemsize
