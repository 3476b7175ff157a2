"""How a checkpoint's tensors map to a model's parameters: explicit, one entry a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes: a parameter, or the rows `part` of a stacked one."""

    parameter: str
    part: str = ""
    transpose: bool = False  # GPT-2's Conv1D stores [in, out]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Every tensor a checkpoint must hold. `prefixes` are alternatives in front of all names, and
    `old_endings` say how names that end so end in older files.

    `aliases` are other names under which a checkpoint may hold a tensor, instead or once more.
    What carries nothing we need is `ignored` by the end of its name (buffers) or by its beginning
    (`ignored_prefixes`: the vision half of a multimodal checkpoint).
    """

    targets: dict[str, Target]
    prefixes: Sequence[str] = ("",)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    ignored_prefixes: Sequence[str] = ()
    old_endings: Mapping[str, str] = field(default_factory=dict)

    def spellings(self, name: str) -> Iterator[str]:
        """What a checkpoint may call the tensor `name`, but for the prefix; today's name first."""
        yield name
        for today, old in self.old_endings.items():
            if name.endswith(today):
                yield name.removesuffix(today) + old
        yield from self.aliases.get(name, ())


def targets_by_module(model: nn.Module, names: Mapping[str, str]) -> dict[str, Target]:
    """A target for every parameter of `model`, by what the checkpoint calls the module it is in.

    In `names` {i} is the number of a block and {part} the name of a slice of a stacked linear.
    """
    targets: dict[str, Target] = {}
    for parameter, _ in model.named_parameters():
        module, _, kind = parameter.rpartition(".")
        number = BLOCK_NUMBER.search(module)
        pattern = BLOCK_NUMBER.sub("{i}", module)
        assert pattern in names, f"{parameter}: what do checkpoints call {pattern!r}?"
        for part in getattr(model.get_submodule(module), "parts", [""]):
            spelled = names[pattern].format(i=number and number[0], part=part)
            tensor = f"{spelled}.{kind}".lstrip(".")
            assert tensor not in targets, f"{tensor} is {targets[tensor].parameter} and {parameter}"
            targets[tensor] = Target(parameter, part)
    return targets
