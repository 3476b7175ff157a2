"""Linear layers, with several projections of one input stacked into one matmul.

On a CPU, or if it is quantised, the weight is packed once it is loaded (`weights/pack.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.lora import LinearAdapters
from engine.layers.weights.pack import Weight, pack, pack_codes
from engine.ops.codes import Quantization
from engine.ops.kernels import Kernels
from engine.ops.linear import linear
from engine.ops.quantise import Codes, CodesForm, stacked


class Linear(nn.Module):
    """y = x W^T + b with x [T, in], y [T, out].

    `parts` names slices of the output rows that come from different checkpoint tensors. Unless
    `is_rounded`, the weight is not quantised when the model is.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | dict[str, int],
        *,
        bias: bool = False,
        is_rounded: bool = True,
    ) -> None:
        super().__init__()
        self.is_rounded = is_rounded
        sizes = out_features if isinstance(out_features, dict) else {"": out_features}
        self.parts: dict[str, slice] = {}
        rows = 0
        for name, size in sizes.items():
            self.parts[name] = slice(rows, rows + size)
            rows += size
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, in_features))
        # If set, the checkpoint's codes are kept, all parts in this form.
        self.stored_form: CodesForm | None = None
        self._stored: dict[str, Codes] = {}
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self._packed: Weight | None = None
        self.adapters: LinearAdapters | None = None
        self.kernels: Kernels = "torch"

    def take_codes(self, part: str, codes: Codes) -> bool:
        """Take a part of a weight with a `stored_form`. Returns whether numbers are needed."""
        self._stored[part] = codes
        return False

    def prepack(self, quantization: Quantization | None = None) -> None:
        """Pack the weight and free the plain one; irreversible. See `pack`.

        `kernels` must be set before.
        """
        if self._stored:
            codes = stacked([self._stored[part] for part in self.parts])
            self._packed = pack_codes(codes, self.bias)
            self._stored.clear()
            self.weight = None
            return
        assert self.weight is not None
        kind = quantization if self.is_rounded else None
        self._packed = pack(self.weight.data, self.bias, kernels=self.kernels, quantization=kind)
        if self._packed is not None:
            self.weight = None

    @property
    def packed_bytes(self) -> int:
        """The bytes of the packed weight, 0 if it is plain."""
        return 0 if self._packed is None else self._packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._multiply(x)
        return y if self.adapters is None else self.adapters.add(x, y)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x)
        assert self.weight is not None
        return linear(x, self.weight, self.bias, kernels=self.kernels)
