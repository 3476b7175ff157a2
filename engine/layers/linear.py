"""Linear layers, with several projections of one input stacked into one matmul.

A layer holds a `Weight` (`weights/weight.py`), which loads, divides, packs and multiplies it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from engine.checkpoint.parameters import LoadedLayer
from engine.device.ranks import UNEVEN, Ranks, Shard
from engine.errors import ConfigError
from engine.layers.lora import LinearAdapters
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.kernels import Kernels


class Linear(LoadedLayer):
    """y = x W^T + b with x [T, in], y [T, out].

    `out_features` may name parts, slices of the output rows that come from different checkpoint
    tensors. Unless `is_rounded`, the weight is not quantised when the model is.

    Ranks may divide the layer by its outputs or by its inputs. `output_units` gives the number of
    equal units of each part that stay together, such as heads; `input_units` that of the inputs.
    Without both, each rank has the whole layer.
    """

    takes_adapters = True

    def __init__(
        self,
        in_features: int,
        out_features: int | dict[str, int],
        *,
        bias: bool = False,
        is_rounded: bool = True,
        output_units: Mapping[str, int] | None = None,
        input_units: int | None = None,
    ) -> None:
        super().__init__()
        self.is_rounded = is_rounded
        self.output_units, self.input_units = output_units, input_units
        sizes = out_features if isinstance(out_features, dict) else {"": out_features}
        rows = sum(sizes.values())
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.tensors: Weight = Weight(self._parameters, sizes)
        self._ranks: Ranks | None = None  # that each have some of the inputs
        self.leaves_sum = False  # the norm behind this layer adds the ranks' products
        self.adapters: LinearAdapters | None = None
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep the shard of this rank. The weight is on the meta device.

        Raises ConfigError if the units cannot be divided.
        """
        if self.output_units is None and self.input_units is None:
            return
        slices = self.tensors.slices
        outputs, inputs = self.tensors.plain.shape
        rows = {part: slice(0, each.stop - each.start) for part, each in slices.items()}
        columns = slice(0, inputs)
        if self.output_units is not None:
            for part, units in self.output_units.items():
                rows[part] = ranks.units(rows[part].stop, units)
        else:
            assert self.input_units is not None
            if self.input_units % ranks.count:
                raise ConfigError(f"has {self.input_units} inputs, which {ranks.count} {UNEVEN}")
            columns = ranks.units(inputs, self.input_units)
            self._ranks = ranks
            self.tensors.adds_bias = False
        self.tensors.take_shard(Shard((outputs, inputs), slices, rows, columns))

    def prepack(self, quantization: Quantization | None = None) -> None:
        """Pack the weight, see `Weight.pack`. `kernels` must be set before."""
        self.tensors.pack(self.kernels, quantization if self.is_rounded else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.tensors.multiply(x, self.kernels)
        if self.adapters is not None:  # before the sum: a rank has a part of each adapter, too
            product = self.adapters.add(x, product)
        return self.summed(product)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products, if they divide the inputs, with the bias."""
        if self._ranks is None or self.leaves_sum:
            return product
        total = self._ranks.sum(product)
        return total if self.bias is None else total + self.bias
