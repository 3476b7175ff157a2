"""The longest sequence that is served, and the default token budgets of a step."""

from __future__ import annotations

import torch

from engine.config import MAX_TOKENS, EngineConfig
from engine.errors import ConfigError

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 256, 2048
CPU_ENCODER_TOKENS, GPU_ENCODER_TOKENS = 512, 16384
UNBOUNDED_CONTEXT_TOKENS = 512  # default context of a model without a longest position


def default_budgets(device: torch.device) -> tuple[int, int]:
    """Return the token budgets of a step, of its decoder part and its encoder part."""
    if device.type == "cpu":
        return CPU_STEP_TOKENS, CPU_ENCODER_TOKENS
    return GPU_STEP_TOKENS, GPU_ENCODER_TOKENS


def max_model_len(config: EngineConfig, own: int | None) -> int:
    """Return the context to serve: the configured one, within the model's `own` positions."""
    wanted = config.max_model_len
    if own is None:
        return wanted or UNBOUNDED_CONTEXT_TOKENS
    if wanted is not None and wanted > own:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {own} positions of this model. "
            f"Use --max-model-len {own} or less."
        )
    if wanted is None and own > MAX_TOKENS:
        raise ConfigError(
            f"config.json has {own} positions. Set --max-model-len to the number to serve, "
            f"at most {MAX_TOKENS}."
        )
    return wanted or own
