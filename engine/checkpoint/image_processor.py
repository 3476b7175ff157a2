"""The config of a checkpoint's image processor, which models read with their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import read_json
from engine.errors import ConfigError

KEY = "image_processor"


def with_image_processor(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json with the image processor's config as "image_processor", if there is one.

    transformers takes it from processor_config.json as a whole, and only without it there reads
    preprocessor_config.json. Raises ConfigError if one is not an object.
    """
    if "vision_config" not in config:
        return config
    found: Any = None
    if (folder / "processor_config.json").exists():
        found = read_json(folder / "processor_config.json").get(KEY)
    if found is None and (folder / "preprocessor_config.json").exists():
        found = read_json(folder / "preprocessor_config.json")
    if found is None:
        return config
    if not isinstance(found, dict):
        raise ConfigError(f"processor_config.json has {KEY} = {found!r:.80}; it must be an object.")
    return config | {KEY: found}
