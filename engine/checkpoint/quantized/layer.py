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


@dataclass(frozen=True, slots=True)
class Layer:
    """The stored tensors of a layer, by what follows its name: `qweight`, `weight_scale`."""

    name: str
    parts: Mapping[str, StoredTensor]

    def part(self, ending: str, dtypes: Collection[str], ndim: int | None = None) -> StoredTensor:
        """Return a tensor. Raises ConfigError if it is missing or of another dtype or rank."""
        found = self.parts.get(ending)
        if found is None:
            other = next(iter(self.parts.values()))
            raise ConfigError(f"{self.name}.{ending} is missing: {other.file} has {other.name}.")
        if found.dtype not in dtypes:
            raise ConfigError(
                f"{found.name} in {found.file} has dtype {found.dtype}; its method stores "
                f"{' or '.join(dtypes)}."
            )
        if ndim is not None and (len(found.shape) != ndim or 0 in found.shape):
            raise ConfigError(
                f"{found.name} in {found.file} has shape {list(found.shape)}; it must have {ndim} "
                "dimensions above 0."
            )
        return found

    def refuse_both(self, one: str, other: str) -> None:
        """Raise ConfigError if a layer has two tensors that exclude each other."""
        if one in self.parts and other in self.parts:
            found = self.parts[one]
            raise ConfigError(
                f"{found.name} in {found.file} and {self.name}.{other} exclude each other."
            )


def check_shape(tensor: StoredTensor, *due: Shape) -> None:
    """Raise ConfigError if a tensor has none of the shapes that are due."""
    if tensor.shape not in due:
        shapes = " or ".join(str(list(shape)) for shape in due)
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
    found = tensor.read().long()
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < groups:
        raise ConfigError(
            f"{tensor.name} in {tensor.file} names groups from {int(found.min())} to "
            f"{int(found.max())}; the layer has {groups}."
        )
    return found
