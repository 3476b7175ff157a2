"""The settings of images in the files of a checkpoint, which models read with their config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.image_config import missing_tower, read_image_config

KEY, VISION = "image_processor", "vision_config"


def with_image_processor(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json with the image processor's config as "image_processor", if there is one.

    If the folder lacks the tower of a model that is served without, "vision_config" is null.
    Raises ConfigError as `read_image_config` and `missing_tower` do.
    """
    if missing_tower(config, folder) is not None:
        return config | {VISION: None}
    if VISION not in config:
        return config
    found = read_image_config(folder)
    return config if found is None else config | {KEY: found.values}
