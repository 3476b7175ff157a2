"""One quantised layer of a checkpoint: several stored tensors instead of one matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from engine.checkpoint.stored import StoredTensor
from engine.errors import ConfigError

Shape = tuple[int, ...]
FLOATS = ("F16", "BF16", "F32")  # dtypes of scales


@dataclass(frozen=True, slots=True)
class Names:
    """How the stored tensors of a layer are named, and the weight that they stand for."""

    separator: str  # between the layer's name and what follows it
    weight: str  # what follows the layer's name in the checkpoint that was quantised


OF_MODULE = Names(".", ".weight")
OF_PARAMETER = Names("_", "")
OF_WEIGHT = Names(".weight", ".weight")  # .weight itself, and .weight.absmax


@dataclass(frozen=True, slots=True)
class Layer:
    """The stored tensors of a layer, by what follows its name: `qweight`, `weight_scale`."""

    name: str
    parts: Mapping[str, StoredTensor]
    names: Names = OF_MODULE

    def part(self, ending: str, dtypes: Collection[str], ndim: int | None = None) -> StoredTensor:
        """Return a tensor. Raises ConfigError if it is missing or of another dtype or rank."""
        tensor = self.parts.get(ending)
        if tensor is None:
            other = next(iter(self.parts.values()))
            missing = self.name + self.names.separator + ending
            raise ConfigError(f"{missing} is missing: {other.file} has {other.name}.")
        if tensor.dtype not in dtypes:
            raise ConfigError(
                f"{tensor.name} in {tensor.file} has dtype {tensor.dtype}; its method stores "
                f"{' or '.join(dtypes)}."
            )
        if ndim is not None and (len(tensor.shape) != ndim or 0 in tensor.shape):
            raise ConfigError(
                f"{tensor.name} in {tensor.file} has shape {list(tensor.shape)}; it must have "
                f"{ndim} dimensions above 0."
            )
        return tensor

    def refuse(self, ending: str, form: str) -> None:
        """Raise ConfigError if a layer has a tensor that its form does not allow."""
        tensor = self.parts.get(ending)
        if tensor is not None:
            raise ConfigError(f"{tensor.name} in {tensor.file} has no meaning in {form}.")

    def refuse_both(self, one: str, other: str) -> None:
        """Raise ConfigError if a layer has two tensors that exclude each other."""
        if one in self.parts and other in self.parts:
            tensor = self.parts[one]
            raise ConfigError(
                f"{tensor.name} in {tensor.file} and {self.name}.{other} exclude each other."
            )


def check_shape(tensor: StoredTensor, *expected: Shape) -> None:
    """Raise ConfigError if a tensor has none of the shapes that are expected."""
    if tensor.shape not in expected:
        shapes = " or ".join(str(list(shape)) for shape in expected)
        raise ConfigError(
            f"{tensor.name} in {tensor.file} has shape {list(tensor.shape)}; the layer and "
            f"config.json ask for {shapes}."
        )


def check_divides(tensor: StoredTensor, count: int, by: int, what: str) -> None:
    """Raise ConfigError if `count` (`what`, such as inputs) do not fill groups of `by`."""
    if count % by:
        raise ConfigError(
            f"{tensor.name} in {tensor.file} has {count} {what}, which do not fill groups of {by}."
        )


def read_groups(tensor: StoredTensor, groups: int) -> torch.Tensor:
    """Return the group of each input [inputs]. Raises ConfigError if one is out of range."""
    groups_of = tensor.read().long()
    if groups_of.numel() and not 0 <= int(groups_of.min()) <= int(groups_of.max()) < groups:
        raise ConfigError(
            f"{tensor.name} in {tensor.file} names groups from {int(groups_of.min())} to "
            f"{int(groups_of.max())}; the layer has {groups}."
        )
    return groups_of
