"""The language model inside a multimodal checkpoint. Its other parts are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.checkpoint.weight_map import Target, WeightMap
from engine.errors import ConfigError
from engine.models.base import required

VISION = ("vision_tower.", "multi_modal_projector.")
# Old checkpoints have the first and the third one, new ones the second and the last.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "")


def nested_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return `text_config`. Raises ConfigError if it is missing or not an object."""
    text = required(config, "text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json has text_config = {text!r}; it must be an object.")
    return text


def nested_weight_map(
    targets: Mapping[str, Target], aliases: Mapping[str, Sequence[str]]
) -> WeightMap:
    """Return the map of a nested model, from the names of the tensors without its prefix."""
    ignored = [prefix + part for prefix in ("", "model.") for part in VISION]
    return WeightMap(dict(targets), prefixes=PREFIXES, aliases=aliases, ignored_prefixes=ignored)
