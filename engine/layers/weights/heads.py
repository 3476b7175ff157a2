"""The weights that expand a latent vector to the keys and values of each head."""

from __future__ import annotations

import torch

from engine.checkpoint.parameters import Parameters
from engine.layers.weights.experts import PackedExperts
from engine.layers.weights.pack import pack
from engine.layers.weights.weight import Weight
from engine.ops.codes import Quantization
from engine.ops.experts import ExpertRows
from engine.ops.kernels import Kernels
from engine.ops.quantize import CodesForm


class HeadsWeight(Weight):
    """The weight [heads * (key + value), latent]: each head's rows of keys, then those of values.

    Both parts are multiplied per head: keys with the queries, so transposed, and values with the
    attended latents. On a CPU each head's part is packed alone, so that a row has the same bits for
    any number of rows.
    """

    def __init__(self, parameters: Parameters, heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__(parameters, {"": heads * (key_dim + value_dim)})
        self._sizes = key_dim, value_dim
        self.packed_keys: PackedExperts | None = None
        self.packed_values: PackedExperts | None = None

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
            return _multiplied(queries, self.packed_keys)
        keys, _ = self._by_head()
        return torch.bmm(queries.transpose(0, 1), keys).transpose(0, 1)

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the values [T, heads, value] of latents [T, heads, latent]."""
        if self.packed_values is not None:
            return _multiplied(latents, self.packed_values)
        _, values = self._by_head()
        return torch.bmm(latents.transpose(0, 1), values.mT).transpose(0, 1)

    def _by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the plain weights of keys and of values, [heads, key or value, latent]."""
        keys, values = self.plain.unflatten(0, (-1, sum(self._sizes))).split(self._sizes, dim=1)
        return keys, values


def _packed(weights: torch.Tensor, kernels: Kernels) -> PackedExperts | None:
    """Return the weights [heads, out, in] packed, or None if they stay plain."""
    forms = [pack(weight.contiguous(), None, kernels=kernels) for weight in weights]
    kept = [form for form in forms if form is not None]
    return PackedExperts(kept, kernels) if kept else None


def _multiplied(x: torch.Tensor, weights: PackedExperts) -> torch.Tensor:
    """Return x [T, heads, in] times each head's weight [out, in], as [T, heads, out]."""
    tokens, heads, _ = x.shape
    starts = torch.arange(0, heads * tokens + 1, max(tokens, 1), device=x.device)
    pairs = torch.arange(heads * tokens, device=x.device)
    by_head = x.transpose(0, 1).reshape(heads * tokens, -1)
    product = weights(by_head, ExpertRows(pairs, starts, 1))
    return product.unflatten(0, (heads, tokens)).transpose(0, 1)
