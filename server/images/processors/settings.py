"""Readers of the settings that several families of image processors share.

A setting that changes pixels is applied or refused by name. Some settings of transformers change no
pixel of a picture, and any value passes: `do_pad` pads a batch of pictures to the largest one, and
`do_convert_rgb` leaves a picture that is RGB as it is. Every picture here is RGB.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.image_config import NESTED_FILE, ImageConfig, is_positive
from engine.errors import ConfigError
from server.images.processors.resize import NUM_FILTERS

PLAIN_FLAGS = ("do_convert_rgb", "do_normalize", "do_pad", "do_rescale", "do_resize")
# Settings of other image processors, which would change the size of a picture.
FOREIGN = ("pad_size", "size_divisor")


def check_settings(config: ImageConfig, *flags: str) -> None:
    """Raise ConfigError for a step that is on but unknown to the family, which knows `flags`."""
    if not config.flag("do_resize", True):
        config.refuse("do_resize", "true")
    for name in FOREIGN:
        if config.get(name, None) is not None:
            config.refuse(name, "null")
    known = {*PLAIN_FLAGS, *flags}
    for name in config.values:
        is_step = name.startswith("do_") and name not in known
        if is_step and config.flag(name, False):
            config.refuse(name, "false")


def resample_of(config: ImageConfig, default: int) -> int:
    """Return the number of Pillow's filter."""
    value = config.get("resample", default)
    is_filter = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUM_FILTERS
    if not is_filter:
        config.refuse("resample", f"Pillow's filters, 0 to {NUM_FILTERS - 1}")
    return int(value)


def edge_of(config: ImageConfig, name: str, default: int, *keys: str) -> int:
    """Return the side of a square: a number, {"height": n, "width": n} or {key: n}."""
    value = config.get(name, default)
    if isinstance(value, dict):
        allowed = [{"height", "width"}, *({key} for key in keys)]
        given = {key: side for key, side in value.items() if side is not None}
        sides = set(given.values()) if set(given) in allowed else set()
        value = sides.pop() if len(sides) == 1 else None
    if not is_positive(value):
        forms = ["n", '{"height": n, "width": n}', *(f'{{"{key}": n}}' for key in keys)]
        config.refuse(name, ", ".join(forms))
    return int(value)


def processor_integer(config: ImageConfig, name: str, default: int) -> int:
    """Return a number of processor_config.json."""
    value = config.processor.get(name)
    value = default if value is None else value
    if not is_positive(value):
        raise ConfigError(f"{NESTED_FILE} has {name} = {value!r:.200}; it must be at least 1.")
    return int(value)


def token_of(config: ImageConfig, name: str, default: str) -> str:
    """Return a token's text of processor_config.json."""
    value = config.processor.get(name)
    value = default if value is None else value
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{NESTED_FILE} has {name} = {value!r:.200}; it must be a token's text.")
    return value


def vision_of(model: dict[str, Any]) -> dict[str, Any]:
    """Return vision_config of config.json."""
    vision = model.get("vision_config")
    if not isinstance(vision, dict):
        raise ConfigError("config.json has no vision_config, which a model that sees needs.")
    return vision


def model_integer(values: dict[str, Any], name: str, default: int) -> int:
    """Return a number of config.json or its vision_config."""
    value = values.get(name)
    value = default if value is None else value
    if not is_positive(value):
        raise ConfigError(f"config.json has {name} = {value!r:.200}; it must be at least 1.")
    return int(value)


def check_equal(file: str, name: str, given: object, model_name: str, of_model: object) -> None:
    """Raise ConfigError if the image processor and the model disagree on a number."""
    if given != of_model:
        raise ConfigError(
            f"{file} has {name} = {given!r:.200}, but config.json has {model_name} = "
            f"{of_model!r:.200}: the files belong to different models."
        )
