"""Factors on queries that grow with the position, as in Llama 4 and Ministral 3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ConfigError
from engine.layers.position_tables import PositionTables
from engine.layers.rotary import rope_parameters


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Settings of the factor 1 + beta * ln(1 + floor(position / period)).

    It keeps attention to long contexts sharp. Source: transformers 5.24, Ministral3Attention.
    """

    beta: float
    period: int  # positions between two steps of the factor

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> QueryScaling:
        """Read `rope_parameters`. Raises ConfigError if a setting is missing or no number."""
        given = rope_parameters(config)
        beta: Any = given.get("llama_4_scaling_beta")
        if type(beta) not in (int, float) or not 0 <= beta < math.inf:
            raise ConfigError(
                f"config.json has llama_4_scaling_beta = {beta!r:.40} in rope_parameters; it must "
                "be a number from 0 on."
            )
        key = "original_max_position_embeddings"
        period: Any = given.get(key, config.get("max_position_embeddings"))
        if type(period) is not int or period < 1:
            raise ConfigError(
                f"config.json has {key} = {period!r:.40} in rope_parameters; it must be a whole "
                "number above 0."
            )
        return cls(float(beta), period)


class QueryScales(PositionTables):
    """The factor of each position, in the model's dtype."""

    scales: torch.Tensor  # [max_positions, 1, 1]

    def __init__(self, scaling: QueryScaling, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__({"scales": (max_positions, 1, 1)}, dtype)
        self.scaling = scaling
        if not self.is_planned:
            self.fill()

    def fill(self) -> None:
        positions = torch.arange(len(self.scales), device="cpu")
        periods = (positions // self.scaling.period).float()
        scales = 1 + self.scaling.beta * torch.log(1 + periods)
        self.scales = scales.to(self.scales.dtype)[:, None, None]

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, 1, 1]."""
        return self.scales.index_select(0, positions)
