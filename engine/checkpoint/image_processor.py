"""The config of a checkpoint's image processor, which models read with their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.image_config import read_image_config

KEY = "image_processor"


def with_image_processor(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json with the image processor's config as "image_processor", if there is one.

    Raises ConfigError as `read_image_config` does.
    """
    if "vision_config" not in config:
        return config
    found = read_image_config(folder)
    return config if found is None else config | {KEY: found.values}
