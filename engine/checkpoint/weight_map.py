"""The mapping from a checkpoint's tensors to a model's parameters, with one entry per tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from engine.checkpoint.parameters import parameters_of, stacked_slices

BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Our module name -> its name in a checkpoint, or the names of the slices of a stacked linear.
Names = Mapping[str, str | Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of one checkpoint tensor: a parameter, or the rows `part` of a stacked one.

    If `groups` is not 0, the tensor has the rows of several `parts`, or of all if these are empty,
    in this number of equal groups. Each group has its share of every part, in the order of `parts`.
    """

    parameter: str
    part: str = ""
    transpose: bool = False  # GPT-2's Conv1D stores [in, out]
    experts: int = 0  # if not 0, the first dimension: their rows follow each other
    groups: int = 0
    parts: tuple[str, ...] = ()
    flattens: bool = False  # the dimensions after the first become one: a convolution's kernel

    def count(self, slices: Mapping[str, slice], outputs: int) -> int:
        """Return how many rows the tensor has. The parameter has `outputs`, of these `slices`."""
        parts = self.parts or tuple(slices) if self.groups else (self.part,)
        return sum(len(range(*slices[part].indices(outputs))) for part in parts)

    def rows(self, slices: Mapping[str, slice]) -> dict[str, slice | torch.Tensor]:
        """Return which rows of the tensor belong to each part that it fills, of all `slices`."""
        if not self.groups:
            return {self.part: slice(None)}
        sizes = {
            part: (slices[part].stop - slices[part].start) // self.groups
            for part in self.parts or slices
        }
        if self.groups == 1:
            return dict(stacked_slices(sizes))
        count = self.groups * sum(sizes.values())
        indices = torch.arange(count, device="cpu").view(self.groups, -1)
        shares = indices.split(list(sizes.values()), dim=1)
        return {part: each.flatten() for part, each in zip(sizes, shares, strict=True)}


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Every tensor that a checkpoint must contain, as name -> target.

    `prefixes` are alternative beginnings of all names. `old_endings` maps an ending of a name to
    its spelling in older files. `aliases` lists further names of a tensor, which a checkpoint may
    use instead of its name or for a copy. `fused` are tensors that a checkpoint may have in place
    of all those of a parameter. Tensors that are not needed are ignored by the end of their name
    (`ignored`, for buffers) or by its beginning (`ignored_prefixes`, for the vision half of a
    multimodal checkpoint).
    """

    targets: dict[str, Target]
    prefixes: Sequence[str] = ("",)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fused: Mapping[str, Target] = field(default_factory=dict)
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


def targets_by_module(model: nn.Module, names: Names) -> dict[str, Target]:
    """Return a target for every parameter of `model`.

    `names` maps our module names to those of a checkpoint. In it, {i} is the number of a block and
    {part} the name of a slice of a stacked linear. Slices with the same name are one tensor, one
    after the other: all of them, if the name has no {part}.
    """
    targets: dict[str, Target] = {}
    for parameter, _ in model.named_parameters():
        module, _, kind = parameter.rpartition(".")
        number = BLOCK_NUMBER.search(module)
        pattern = BLOCK_NUMBER.sub("{i}", module)
        assert pattern in names, f"{parameter}: no checkpoint name for {pattern!r}"
        known = names[pattern]
        parameters = parameters_of(model.get_submodule(module))
        slices, flattens = list(parameters.slices), parameters.flattens and kind == "weight"
        parts = slices if isinstance(known, str) else list(known)
        parts_of: dict[str, list[str]] = {}
        for part in parts:
            spelling = known if isinstance(known, str) else known[part]
            spelled = spelling.format(i=number and number[0], part=part)
            parts_of.setdefault(f"{spelled}.{kind}".lstrip("."), []).append(part)
        for tensor, fused in parts_of.items():
            assert tensor not in targets, (
                f"{tensor} fills both {targets[tensor].parameter} and {parameter}"
            )
            if len(fused) == 1:
                targets[tensor] = Target(parameter, fused[0], flattens=flattens)
            else:
                named = () if fused == slices else tuple(fused)
                targets[tensor] = Target(parameter, groups=1, parts=named)
    return targets


def fused_experts(module: str, name: str, layers: int, count: int) -> dict[str, Target]:
    """Return targets for checkpoints with two tensors of all experts in a layer.

    Such a tensor has no ending `.weight`. {i} is the number of a block in `module`, our name of
    `Experts`, and in `name`, that of the experts in a checkpoint.
    """
    found: dict[str, Target] = {}
    for index in range(layers):
        for ours, theirs in (("up", "gate_up"), ("down", "down")):
            parameter = f"{module.format(i=index)}.expert_{ours}.weight"
            target = Target(parameter, experts=count, groups=1)
            found[f"{name.format(i=index)}.{theirs}_proj"] = target
    return found
