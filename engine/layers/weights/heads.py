"""The weights that expand a latent vector to the keys and values of each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.checkpoint.parameters import Parameters
from engine.layers.weights.onednn import PackedWeight
from engine.layers.weights.pack import pack
from engine.layers.weights.packed import PackedForm
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.kernels import Kernels
from engine.ops.quantize import CodesForm

if TYPE_CHECKING:
    from engine.kernels.numba.experts import HeadsMultiply


class PackedHeads:
    """The packed weight [out, in] of each head."""

    def __init__(self, weights: Sequence[PackedForm], kernels: Kernels) -> None:
        self.weights = weights
        self._together = _heads_kernel(weights, kernels)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, in] -> [T, heads, out]."""
        if self._together is not None:
            return self._together.of_heads(x)
        rows = x.unbind(1)
        products = [
            multiply(own.contiguous()) for multiply, own in zip(self.weights, rows, strict=True)
        ]
        return torch.stack(products, dim=1)


class HeadsWeight(Weight):
    """The weight [heads * (key + value), latent]: each head's rows of keys, then those of values.

    Both parts are multiplied per head: keys with the queries, so transposed, and values with the
    attended latents. On a CPU each head's part is packed alone, so that a row has the same bits for
    any number of rows.
    """

    def __init__(self, parameters: Parameters, heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__(parameters, {"": heads * (key_dim + value_dim)})
        self._sizes = key_dim, value_dim
        self.packed_keys: PackedHeads | None = None
        self.packed_values: PackedHeads | None = None

    @property
    def packed_bytes(self) -> int:
        packed = self.packed_keys, self.packed_values
        return sum(each.nbytes for each in packed if each is not None)

    def keep_codes(self, form: CodesForm | None) -> None:
        """Dequantise: codes in groups of latent numbers do not fit the transposed keys."""

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """Pack both parts of each head, and free the plain weight; irreversible."""
        assert quantization is None
        keys, values = self._by_head()
        self.packed_keys = _packed(keys.mT, kernels)
        self.packed_values = _packed(values, kernels)
        if self.packed_keys is not None:
            self._parameters["weight"] = None

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Return queries [T, heads, key] times the weight of the keys, [T, heads, latent]."""
        if self.packed_keys is not None:
            return self.packed_keys(queries)
        keys, _ = self._by_head()
        return torch.bmm(queries.transpose(0, 1), keys).transpose(0, 1)

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the values [T, heads, value] of latents [T, heads, latent]."""
        if self.packed_values is not None:
            return self.packed_values(latents)
        _, values = self._by_head()
        return torch.bmm(latents.transpose(0, 1), values.mT).transpose(0, 1)

    def _by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the plain weights of keys and of values, [heads, key or value, latent]."""
        keys, values = self.plain.unflatten(0, (-1, sum(self._sizes))).split(self._sizes, dim=1)
        return keys, values


def _packed(weights: torch.Tensor, kernels: Kernels) -> PackedHeads | None:
    """Return the weights [heads, out, in] packed, or None if they stay plain."""
    forms = [pack(weight.contiguous(), None, kernels=kernels) for weight in weights]
    kept = [form for form in forms if form is not None]
    return PackedHeads(kept, kernels) if kept else None


def _heads_kernel(weights: Sequence[PackedForm], kernels: Kernels) -> HeadsMultiply | None:
    """Return a kernel for the weights of all heads, or None if each one goes alone."""
    if kernels != "numba":
        return None
    from engine.kernels.numba.experts import HeadsMultiply

    forms = (each.any_rows for each in weights if isinstance(each, PackedWeight))
    layers = [form for form in forms if form is not None]
    return HeadsMultiply(layers) if len(layers) == len(weights) else None
