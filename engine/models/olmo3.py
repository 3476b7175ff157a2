"""OLMo 3 (arXiv 2512.13961): OLMo 2 with a sliding window on three of four layers.

Scaling to longer contexts applies to the layers without a window only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.batch import ForwardBatch
from engine.errors import ConfigError
from engine.layers.rotary import (
    RopeScaling,
    RotaryEmbedding,
    expect_truncated,
    parameters_by_kind,
    rope_theta,
)
from engine.models.base import layer_windows, nullable, positive
from engine.models.llama import LlamaConfig
from engine.models.olmo2 import Olmo2, check_olmo

PERIOD = 4  # one layer of these has no window, if config.json has no layer_types
THETA = 5e5  # if config.json has no rope_theta


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo3Config(LlamaConfig):
    """The config of an OLMo 3 checkpoint.

    `rope_theta` and `rope_scaling` apply to global layers, the local_ fields to windowed ones.
    """

    local_theta: float
    local_scaling: RopeScaling


def _rope(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the config with the rotary parameters of one kind of layer, from either spelling.

    As in transformers 5.24, `rope_theta` and `rope_scaling` are those of global layers.
    """
    given = parameters_by_kind(config)
    own = {} if given is None else given.get(kind) or {}
    if not isinstance(own, dict):
        raise ConfigError(f"config.json has rope_parameters = {given!r}; {kind} must be an object.")
    theta = None
    if kind == "full_attention":
        theta = config.get("rope_theta")
        if given is None:
            own = config.get("rope_scaling") or {}
    expect_truncated(own)
    outside = {"rope_theta": THETA if theta is None else theta, "rope_scaling": None}
    return config | outside | {"rope_parameters": own}


class Olmo3(Olmo2):
    config: Olmo3Config

    @staticmethod
    def read_config(config: dict[str, Any]) -> Olmo3Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        check_olmo(config)
        local = _rope(config, "sliding_attention")
        window = nullable(config, "sliding_window", positive)
        return Olmo3Config.from_hf(
            _rope(config, "full_attention"),
            windows=layer_windows(config, window, lambda index: (index + 1) % PERIOD != 0),
            local_theta=rope_theta(local),
            local_scaling=RopeScaling.from_hf(local),
        )

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        c = self.config
        self.local_rotary = RotaryEmbedding(
            c.head_dim, c.local_theta, c.local_scaling, max_positions, dtype
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed(batch.input_ids), None
        everywhere, nearby = self.rotary(batch.positions), self.local_rotary(batch.positions)
        for block, window in zip(self.blocks, self.config.windows, strict=True):
            angles = everywhere if window is None else nearby
            x, delta = block(x, delta, *angles, batch)
        return self.norm.add(x, delta)[1]
