"""The language model inside a multimodal checkpoint. Its other parts are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.checkpoint.weight_map import Target, WeightMap
from engine.errors import ConfigError
from engine.layers.rotary import rope_parameters
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


def without_mrope(text: dict[str, Any]) -> dict[str, Any]:
    """Return a text model's config with "default" in place of the rotary type "mrope".

    Both have the same frequencies. Raises ConfigError as `rope_parameters`.
    """
    parameters = rope_parameters(text)
    if parameters.get("rope_type", parameters.get("type")) == "mrope":
        parameters = parameters | {"rope_type": "default"}
    return text | {"rope_parameters": parameters, "rope_scaling": None}


def expect_width(given: int, hidden: int) -> None:
    """Raise ConfigError unless a tower's embeddings are as wide as those of the language model."""
    if given != hidden:
        raise ConfigError(
            f"config.json has out_hidden_size {given} in vision_config; the language model has "
            f"hidden_size {hidden}."
        )


def nested_weight_map(
    targets: Mapping[str, Target], aliases: Mapping[str, Sequence[str]]
) -> WeightMap:
    """Return the map of a nested model, from the names of the tensors without its prefix."""
    ignored = [prefix + part for prefix in ("", "model.") for part in VISION]
    return WeightMap(dict(targets), prefixes=PREFIXES, aliases=aliases, ignored_prefixes=ignored)
