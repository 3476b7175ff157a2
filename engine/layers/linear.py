"""Linear layers, with several projections of one input stacked into one matmul.

On a CPU, or if it is quantised, the weight is packed once it is loaded (`weights/pack.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from engine.device.ranks import UNEVEN, Ranks, Share
from engine.errors import ConfigError
from engine.layers.lora import LinearAdapters
from engine.layers.weights.pack import pack, pack_codes
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.kernels import Kernels
from engine.ops.linear import linear
from engine.ops.quantize import Codes, CodesForm, stacked


class Linear(nn.Module):
    """y = x W^T + b with x [T, in], y [T, out].

    `parts` names slices of the output rows that come from different checkpoint tensors. Unless
    `is_rounded`, the weight is not quantised when the model is.

    Ranks may share the layer by its outputs or by its inputs. `output_units` gives the number of
    equal units of each part that stay together, such as heads; `input_units` that of the inputs.
    Without both, each rank has the whole layer.
    """

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
        self.parts = _stacked(sizes)
        rows = sum(sizes.values())
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, in_features))
        self.share: Share | None = None  # None: the whole weight
        self._ranks: Ranks | None = None  # that each have some of the inputs
        # If set, the checkpoint's codes are kept, all parts in this form.
        self.stored_form: CodesForm | None = None
        self._stored: dict[str, Codes] = {}
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self._packed: Weight | None = None
        self.adapters: LinearAdapters | None = None
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep the share of this rank. The weight is on the meta device.

        Raises ConfigError if the units cannot be divided.
        """
        if self.output_units is None and self.input_units is None:
            return
        assert self.weight is not None
        whole, inputs = self.weight.shape
        rows = {part: slice(0, place.stop - place.start) for part, place in self.parts.items()}
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
        self.share = Share((whole, inputs), self.parts, rows, columns)
        sizes = {part: own.stop - own.start for part, own in rows.items()}
        self.parts = _stacked(sizes)
        outputs = sum(sizes.values())
        own_inputs = columns.stop - columns.start
        self.weight = nn.Parameter(self.weight.new_empty(outputs, own_inputs))
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.new_empty(outputs))

    @property
    def _added_bias(self) -> torch.Tensor | None:
        """The bias, unless it is added to the sum of the ranks."""
        return self.bias if self._ranks is None else None

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
            self._packed = pack_codes(codes, self._added_bias)
            self._stored.clear()
            self.weight = None
            return
        assert self.weight is not None
        kind = quantization if self.is_rounded else None
        self._packed = pack(
            self.weight.data, self._added_bias, kernels=self.kernels, quantization=kind
        )
        if self._packed is not None:
            self.weight = None

    @property
    def packed_bytes(self) -> int:
        """The bytes of the packed weight, 0 if it is plain."""
        return 0 if self._packed is None else self._packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x)
        if self.adapters is not None:  # before the sum: a rank has a part of each adapter, too
            product = self.adapters.add(x, product)
        return self.summed(product)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products, if they share the inputs, with the bias."""
        if self._ranks is None:
            return product
        total = self._ranks.sum(product)
        return total if self.bias is None else total + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x times the weight of this rank, with the bias unless it is added later."""
        if self._packed is not None:
            return self._packed(x)
        assert self.weight is not None
        return linear(x, self.weight, self._added_bias, kernels=self.kernels)


def _stacked(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return the rows of each part, one after the other."""
    places: dict[str, slice] = {}
    rows = 0
    for name, size in sizes.items():
        places[name] = slice(rows, rows + size)
        rows += size
    return places
