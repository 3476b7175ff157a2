"""Settings that all models with images read: `vision_config`, and how pixels are scaled.

The arguments are config.json with the image processor's config as "image_processor", as
`with_image_processor` returns it.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.image_config import Colour
from engine.checkpoint.image_processor import KEY
from engine.errors import ConfigError
from engine.models.vision.pixels import Normalization


def vision_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the tower's settings. A missing or null `vision_config` has all defaults.

    Raises ConfigError if they are no object.
    """
    vision = config.get("vision_config")
    if vision is None:
        return {}
    if not isinstance(vision, dict):
        raise ConfigError(f"config.json has vision_config = {vision!r:.80}; it must be an object.")
    return vision


def normalization_of(config: dict[str, Any], mean: Colour, std: Colour) -> Normalization:
    """Return how the image processor scales pixels; `mean` and `std` are its class's defaults.

    Raises ConfigError as `Normalization.from_hf` does.
    """
    return Normalization.from_hf(config.get(KEY) or {}, mean, std)
