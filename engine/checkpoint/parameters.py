"""How the parameters of a layer are filled from checkpoint tensors: part by part, by shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.device.ranks import Shard
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.checkpoint.source import Source
    from engine.checkpoint.weight_map import Target

Parameters = dict[str, nn.Parameter | None]  # of one layer, by name, as PyTorch registers them
WHOLE = {"": slice(None)}


class LayerParameters:
    """The parameters of one layer. Each part of a checkpoint fills the rows `slices` of them.

    If ranks divide the layer, `shard` is what this one keeps, and `slices` are rows of the shard.
    """

    def __init__(self, parameters: Parameters, slices: Mapping[str, slice] = WHOLE) -> None:
        self._parameters = parameters
        self.slices = slices
        self.shard: Shard | None = None
        self.dtype: torch.dtype | None = None  # None: the dtype of the model
        self.flattens = False  # the weight is a convolution's kernel in a checkpoint

    @property
    def whole_slices(self) -> Mapping[str, slice]:
        """The rows of each part in all ranks together."""
        return self.slices if self.shard is None else self.shard.slices

    def take_shard(self, shard: Shard) -> None:
        """Keep this shard of the parameters, which are on the meta device."""
        self.shard = shard
        self.slices = stacked_slices(
            {part: rows.stop - rows.start for part, rows in shard.rows.items()}
        )
        for name, parameter in self._parameters.items():
            if parameter is not None:
                shape = (*shard.kept_shape, *parameter.shape[2:])[: parameter.ndim]
                self._parameters[name] = nn.Parameter(parameter.new_empty(shape))

    def load(self, name: str, target: Target, source: Source) -> None:
        """Fill the parts of the parameter `name` that are `target`'s, and create it if need be.

        Raises ConfigError if the tensor has another shape than config.json asks for, or values that
        are not finite floats.
        """
        self.load_values(name, target, source)

    def load_values(self, name: str, target: Target, source: Source) -> None:
        """Load as `load` does, but always plain values."""
        self.check_shape(name, target, source, source.shape(target))
        parameter = self._parameters[name]
        assert parameter is not None
        if parameter.is_meta:
            dtype = self.dtype or source.dtype
            empty = torch.empty(parameter.shape, dtype=dtype, device=source.device)
            parameter = nn.Parameter(empty, requires_grad=False)
            self._parameters[name] = parameter
        for part, rows in target.rows(self.whole_slices).items():
            kept = self.slices[part]
            if kept.start == kept.stop and kept.stop is not None:  # another rank keeps the part
                continue
            values = source.values(target, part, rows, self.shard)
            parameter.data[kept].copy_(values)

    def expected_shape(self, name: str, target: Target) -> tuple[int, ...]:
        """Return the shape of a target's tensor, in all ranks together."""
        parameter = self._parameters[name]
        assert parameter is not None
        shape = tuple(parameter.shape)
        if self.shard is not None:
            shape = (*self.shard.shape, *parameter.shape[2:])[: parameter.ndim]
        return (target.count(self.whole_slices, shape[0]), *shape[1:])

    def check_shape(
        self, name: str, target: Target, source: Source, shape: tuple[int, ...]
    ) -> None:
        """Raise ConfigError if a tensor does not have the shape that config.json asks for."""
        expected = self.expected_shape(name, target)
        if shape != expected:
            raise ConfigError(
                f"{source.name} in {source.file} has shape {list(shape)}; config.json asks for "
                f"{list(expected)}."
            )


class LoadedLayer(nn.Module):
    """A layer whose parameters have parts or shards. Those of other modules are loaded whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = LayerParameters(self._parameters)


def parameters_of(module: nn.Module) -> LayerParameters:
    """Return how the module's own parameters are loaded."""
    if isinstance(module, LoadedLayer):
        return module.tensors
    return LayerParameters(module._parameters)


def stacked_slices(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return the rows of each part, one after the other."""
    slices: dict[str, slice] = {}
    first = 0
    for part, size in sizes.items():
        slices[part] = slice(first, first + size)
        first += size
    return slices
