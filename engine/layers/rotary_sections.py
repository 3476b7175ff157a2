"""RotarySections: which of a token's three positions rotates which dimensions (MRoPE).

The positions are those of time, height and width (arXiv 2409.12191). In a text all three are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from engine.errors import ConfigError

AXES = 3  # time, height and width


@dataclass(frozen=True, slots=True)
class RotarySections:
    """How many frequencies each axis has: one section behind the other, or `interleaved`.

    Interleaved, every third frequency is that of height, from number 1 on, and of width, from
    number 2 on. All others are those of time.
    """

    counts: tuple[int, int, int]
    interleaved: bool

    @classmethod
    def from_hf(
        cls,
        parameters: dict[str, Any],
        default: tuple[int, int, int],
        frequencies: int,
        *,
        interleaved: bool,
    ) -> Self:
        """Read `mrope_section` of the rotary parameters of heads with `frequencies`.

        Raises ConfigError if it does not divide them into three parts.
        """
        given = parameters.get("mrope_section", default)
        is_list = isinstance(given, list | tuple) and len(given) == AXES
        if not is_list or any(type(count) is not int or count < 0 for count in given):
            raise ConfigError(
                f"config.json has mrope_section = {given!r:.80}; it must be a list of three counts."
            )
        time, height, width = given
        if time + height + width != frequencies:
            raise ConfigError(
                f"config.json has mrope_section = {given!r}, {time + height + width} frequencies; "
                f"the heads have {frequencies}."
            )
        if interleaved and max(3 * height - 1, 3 * width) > frequencies:
            raise ConfigError(
                f"config.json has mrope_section = {given!r}; interleaved, the sections for height "
                "and width do not fit."
            )
        return cls((time, height, width), interleaved)

    def select(self, tables: torch.Tensor) -> torch.Tensor:
        """Tables of each axis [2, 3, T, 1, R] -> the tables [2, T, 1, R] of all.

        R is twice the number of frequencies, which are the columns of both halves.
        """
        time, height, width = tables.unflatten(-1, (2, -1)).unbind(1)  # [2, T, 1, 2, R / 2]
        selected = time.clone()
        first, second, third = self.counts
        if self.interleaved:
            of_height, of_width = slice(1, 3 * second, 3), slice(2, 3 * third, 3)
        else:
            of_height = slice(first, first + second)
            of_width = slice(first + second, first + second + third)
        selected[..., of_height] = height[..., of_height]
        selected[..., of_width] = width[..., of_width]
        return selected.flatten(-2)
