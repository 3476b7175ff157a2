"""Normalisation layers with their weights.

`add` adds a sublayer's output to the residual stream and norms the sum, in one launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.checkpoint.parameters import LayerParameters, LoadedLayer, stacked_slices
from engine.device.ranks import Ranks, Shard
from engine.ops.gated import silu
from engine.ops.kernels import Kernels
from engine.ops.norm import (
    Tensors,
    add_layer_norm,
    add_rms_norm,
    divide_by_rms,
    gated_rms_norm,
    layer_norm,
    mean_square,
    rms_norm,
)


class RMSNorm(LoadedLayer):
    offset = False  # whether the stored weight is weight - 1

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.kernels: Kernels = "torch"
        self.delta_ranks: Ranks | None = None  # `add` gets the parts of these ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, kernels=self.kernels)

    def add(
        self, x: torch.Tensor, delta: torch.Tensor | None, post: RMSNorm | None = None
    ) -> Tensors:
        """Return x + delta, or x + post(delta), and the norm of the sum; without delta, of x.

        `post` must have the same type and eps as this norm.
        """
        if delta is None:
            return x, self(x)
        if self.delta_ranks is not None:
            assert post is None
            one_shot = self.delta_ranks.one_shot
            if one_shot is not None:
                added = one_shot.add_norm(x, delta, self.weight, self.eps, offset=self.offset)
                if added is not None:
                    return added
            delta = self.delta_ranks.sum(delta)
        weight = None if post is None else post.weight
        return add_rms_norm(
            x, delta, self.weight, self.eps, offset=self.offset, post=weight, kernels=self.kernels
        )


class OffsetRMSNorm(RMSNorm):
    """RMSNorm as in Gemma: the stored weight is weight - 1."""

    offset = True


class GatedRMSNorm(nn.Module):
    """RMSNorm of the last dimension, times silu of a gate."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x and gate [T, H, dim] -> [T, H, dim]."""
        return gated_rms_norm(
            x, gate, self.weight, self.eps, gate_first=False, kernels=self.kernels
        )


class SharedRMSNorm(RMSNorm):
    """RMSNorm of `heads` heads together. Ranks may divide them: see `norm_together`."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(heads * head_dim, eps)
        self.heads = heads
        self.ranks = Ranks()

    def divide(self, ranks: Ranks) -> None:
        """Keep the weights of this rank's heads. Raises ConfigError if that is not possible."""
        dim = len(self.weight)
        rows = {"": ranks.units(dim, self.heads)}
        self.tensors.take_shard(Shard((dim, 1), {"": slice(0, dim)}, rows, slice(0, 1)))
        self.ranks = ranks


def norm_together(
    norms: Sequence[SharedRMSNorm], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return each tensor [T, own heads * D] divided by its root mean square over all ranks.

    The mean squares of all tensors take one sum. Each head is kept by equally many ranks, so the
    mean of the ranks' means is that of all heads.
    """
    ranks = norms[0].ranks
    if ranks.count == 1:
        return [norm(x) for norm, x in zip(norms, tensors, strict=True)]
    squares = torch.cat([mean_square(x) for x in tensors], dim=1)
    means = (ranks.sum(squares) / ranks.count).split(1, dim=1)
    return [
        divide_by_rms(x, mean, norm.weight, norm.eps)
        for norm, x, mean in zip(norms, tensors, means, strict=True)
    ]


class HeadLayerNorm(LoadedLayer):
    """LayerNorm without a bias of each of `heads` heads, each with its own weight.

    A checkpoint has a tensor for each head, which is the part with its number.
    """

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads * head_dim))
        self.head_dim, self.eps = head_dim, eps
        slices = stacked_slices({str(head): head_dim for head in range(heads)})
        self.tensors = LayerParameters(self._parameters, slices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, D] -> [T, heads, D], computed in fp32."""
        normed = F.layer_norm(x.float(), (self.head_dim,), eps=self.eps)
        return (normed * self.weight.view(-1, self.head_dim)).to(x.dtype)

    def divide(self, ranks: Ranks) -> None:
        """Keep the weights of this rank's heads. Raises ConfigError if that is not possible."""
        slices, dim = self.tensors.slices, self.head_dim
        kept = ranks.units(len(slices), len(slices))
        rows = {
            part: slice(0, dim if kept.start <= int(part) < kept.stop else 0) for part in slices
        }
        shape = (len(slices) * dim, 1)
        self.tensors.take_shard(Shard(shape, slices, rows, slice(0, 1)))


class GroupedRMSNorm(LoadedLayer):
    """RMSNorm of y * silu(z) in `groups` of equal width, as in Mamba-2, computed in fp32.

    Ranks divide the width in `units`. Ranks that share a group add up its squares.
    """

    def __init__(self, dim: int, eps: float, *, groups: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.groups, self.units = eps, groups, units
        self.ranks = Ranks()
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep the weights of this rank's units. Raises ConfigError if that is not possible."""
        dim = len(self.weight)
        rows = {"": ranks.units(dim, self.units)}
        self.tensors.take_shard(Shard((dim, 1), {"": slice(0, dim)}, rows, slice(0, 1)))
        self.ranks = ranks

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y and z [T, dim] -> [T, dim], in y's dtype."""
        own = max(self.groups // self.ranks.count, 1)  # groups of this rank
        y, z = y.unflatten(1, (own, -1)), z.unflatten(1, (own, -1))
        weight, kernels = self.weight.unflatten(0, (own, -1)), self.kernels
        if self.groups >= self.ranks.count:
            normed = gated_rms_norm(y, z, weight, self.eps, gate_first=True, kernels=kernels)
            return normed.flatten(1)
        gated = y.float() * silu(z.float())
        squares = self._mean_of_ranks(mean_square(gated))
        return divide_by_rms(gated, squares, weight, self.eps).flatten(1).to(y.dtype)

    def _mean_of_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the mean [T, 1, 1] of the `squares` of all ranks that share a group."""
        groups, ranks = self.groups, self.ranks
        group = ranks.own * groups // ranks.count
        of_groups = squares.new_zeros(len(squares), groups, 1)
        of_groups[:, group : group + 1] = squares
        return ranks.sum(of_groups)[:, group : group + 1] * (groups / ranks.count)


class PlainRMSNorm(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, None, self.eps, kernels=self.kernels)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> Tensors:
        """Return x + delta and its norm; without delta, x and its norm."""
        if delta is None:
            return x, self(x)
        return add_rms_norm(x, delta, None, self.eps, kernels=self.kernels)


class Join(nn.Module):
    """A sum in the residual stream that no norm follows at once."""

    def add(
        self, x: torch.Tensor, delta: torch.Tensor | None, post: RMSNorm | None = None
    ) -> Tensors:
        """Return x + delta, or x + post(delta), twice, in the places of a norm's sum and result.

        Without delta, return x.
        """
        if delta is None:
            return x, x
        total = x + (delta if post is None else post(delta))
        return total, total


class ScaledJoin(Join):
    """A Join whose sum is multiplied by a learned number, as at the end of Gemma 4's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.empty(1))

    def add(
        self, x: torch.Tensor, delta: torch.Tensor | None, post: RMSNorm | None = None
    ) -> Tensors:
        total = super().add(x, delta, post)[0] * self.layer_scalar
        return total, total


class LayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.eps = eps
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, kernels=self.kernels)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> Tensors:
        """Return x + delta and its norm; without delta, x and its norm."""
        if delta is None:
            return x, self(x)
        return add_layer_norm(x, delta, self.weight, self.bias, self.eps, kernels=self.kernels)
