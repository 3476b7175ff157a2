"""The mapping from a checkpoint's tensors to a model's parameters, with one entry per tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from engine.checkpoint.parameters import parameters_of

BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of one checkpoint tensor: a parameter, or the rows `part` of a stacked one.

    If `groups` is not 0, the tensor has the rows of all parts, in this number of equal groups. Each
    group has its share of every part, in the order of the parts.
    """

    parameter: str
    part: str = ""
    transpose: bool = False  # GPT-2's Conv1D stores [in, out]
    experts: int = 0  # if not 0, the first dimension: their rows follow each other
    groups: int = 0

    def slice_of(self, slices: Mapping[str, slice]) -> slice:
        """Return which rows of the parameter the tensor fills, of the `slices` of its parts."""
        return slice(None) if self.groups else slices[self.part]

    def rows(self, slices: Mapping[str, slice]) -> dict[str, slice | torch.Tensor]:
        """Return which rows of the tensor belong to each part that it fills, of all `slices`."""
        if not self.groups:
            return {self.part: slice(None)}
        if self.groups == 1:
            return dict(slices)
        sizes = [(rows.stop - rows.start) // self.groups for rows in slices.values()]
        count = self.groups * sum(sizes)
        indices = torch.arange(count, device="cpu").view(self.groups, -1).split(sizes, dim=1)
        return {part: each.flatten() for part, each in zip(slices, indices, strict=True)}


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Every tensor that a checkpoint must contain, as name -> target.

    `prefixes` are alternative beginnings of all names. `old_endings` maps an ending of a name to
    its spelling in older files. `aliases` lists further names of a tensor, which a checkpoint may
    use instead of its name or for a copy. Tensors that are not needed are ignored by the end of
    their name (`ignored`, for buffers) or by its beginning (`ignored_prefixes`, for the vision
    half of a multimodal checkpoint).
    """

    targets: dict[str, Target]
    prefixes: Sequence[str] = ("",)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    ignored_prefixes: Sequence[str] = ()
    old_endings: Mapping[str, str] = field(default_factory=dict)

    def spellings(self, name: str) -> Iterator[str]:
        """Yield the possible names of the tensor `name`, without prefix, the current one first."""
        yield name
        for today, old in self.old_endings.items():
            if name.endswith(today):
                yield name.removesuffix(today) + old
        yield from self.aliases.get(name, ())


def targets_by_module(model: nn.Module, names: Mapping[str, str]) -> dict[str, Target]:
    """Return a target for every parameter of `model`.

    `names` maps our module names to those of a checkpoint. In it, {i} is the number of a block and
    {part} the name of a slice of a stacked linear. A name without {part} is that of a tensor with
    all of them, one after the other.
    """
    targets: dict[str, Target] = {}
    for parameter, _ in model.named_parameters():
        module, _, kind = parameter.rpartition(".")
        number = BLOCK_NUMBER.search(module)
        pattern = BLOCK_NUMBER.sub("{i}", module)
        assert pattern in names, f"{parameter}: no checkpoint name for {pattern!r}"
        parts = list(parameters_of(model.get_submodule(module)).slices)
        is_fused = len(parts) > 1 and "{part}" not in names[pattern]
        for part in [""] if is_fused else parts:
            spelled = names[pattern].format(i=number and number[0], part=part)
            tensor = f"{spelled}.{kind}".lstrip(".")
            assert tensor not in targets, (
                f"{tensor} fills both {targets[tensor].parameter} and {parameter}"
            )
            targets[tensor] = Target(parameter, part, groups=int(is_fused))
    return targets
