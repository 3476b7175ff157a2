"""The weight of a layer, from its parts in a checkpoint to its products."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.checkpoint.parameters import LayerParameters, Parameters, stacked_slices
from engine.checkpoint.source import Source
from engine.checkpoint.weight_map import Target
from engine.layers.weights.pack import pack, pack_codes
from engine.layers.weights.packed import PackedForm
from engine.ops.codes import Quantization
from engine.ops.kernels import Kernels
from engine.ops.linear import linear
from engine.ops.quantize import Codes, CodesForm, stacked


class Weight(LayerParameters):
    """The weight [out, in] of a layer: it loads its parts, keeps a shard, multiplies, is packed.

    Plain values are the layer's parameter `weight`, until `pack` replaces them by a packed form.
    """

    is_head = False  # whether products are logits, in fp32

    def __init__(self, parameters: Parameters, sizes: Mapping[str, int]) -> None:
        """`sizes` are the rows of each part."""
        super().__init__(parameters, stacked_slices(sizes))
        self.adds_bias = True  # False: it is added to the sum of the ranks' products
        self.stored_form: CodesForm | None = None  # of the checkpoint's codes, if they are kept
        self.stored: dict[str, Codes] = {}  # by part, until they are packed
        self.packed: PackedForm | None = None

    @property
    def plain(self) -> torch.Tensor:
        """The values [out, in], before they are packed."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias that is added to the products."""
        return self._parameters.get("bias") if self.adds_bias else None

    @property
    def packed_bytes(self) -> int:
        """The bytes of the packed form, 0 if the weight is plain."""
        return 0 if self.packed is None else self.packed.nbytes

    def keep_codes(self, form: CodesForm | None) -> None:
        """Keep the codes of the checkpoint, all parts in this form; None dequantises them.

        So does a layer with a dtype of its own: no kernel multiplies its inputs with codes.
        """
        self.stored_form = form if self.dtype is None else None

    def load(self, name: str, target: Target, source: Source) -> None:
        if name != "weight" or self.stored_form is None:
            self.load_values(name, target, source)
        else:
            self.load_codes(target, source)

    def load_codes(self, target: Target, source: Source) -> None:
        """Take a tensor's codes. Raises ConfigError as `load` does."""
        codes = source.codes()
        self.check_shape("weight", target, source, tuple(codes.codes.shape))
        for part, rows in target.rows(self.whole_slices).items():
            of_part = codes.of_outputs(rows)
            if self.shard is not None:
                of_part = of_part.of_outputs(self.shard.rows[part]).of_inputs(self.shard.columns)
            self.stored[part] = of_part

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """Pack the weight and free the plain one; irreversible. See `pack` in pack.py."""
        if self.stored:
            codes = stacked([self.stored[part] for part in self.slices])
            packed: PackedForm | None = pack_codes(codes, self.bias, is_head=self.is_head)
        else:
            packed = pack(
                self.plain.data,
                self.bias,
                kernels=kernels,
                is_head=self.is_head,
                quantization=quantization,
            )
        self.stored.clear()
        if packed is not None:
            self.packed = packed
            self._parameters["weight"] = None

    def multiply(
        self, x: torch.Tensor, kernels: Kernels, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] -> [T, out], with the bias; of a plain weight in `out`, if it is given."""
        if self.packed is not None:
            return self.packed(x)
        dtype = torch.float32 if self.is_head else None
        return linear(x, self.plain, self.bias, dtype, out, kernels=kernels)
