"""How a checkpoint's tensors map to a model's parameters: explicit, one entry a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes: a parameter, or the rows `part` of a stacked one."""

    parameter: str
    part: str = ""
    transpose: bool = False  # GPT-2's Conv1D stores [in, out]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Every tensor a checkpoint must hold. `prefixes` are alternatives in front of all names,
    `ignored` are suffixes of tensors that carry nothing we need (buffers, tied copies)."""

    targets: dict[str, Target]
    prefixes: Sequence[str] = ("",)
    ignored: Sequence[str] = field(default_factory=tuple)
