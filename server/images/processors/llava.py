"""The settings of LLaVA-NeXT and LLaVA-OneVision, whose pictures `anyres` prepares."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.image_config import CLIP_MEAN, NESTED_FILE, ImageConfig, is_positive
from engine.errors import ConfigError
from server.images.processors.anyres import AnyresProcessor, Size
from server.images.processors.settings import (
    check_equal,
    check_settings,
    edge_of,
    model_integer,
    processor_integer,
    resample_of,
    token_of,
    vision_of,
)

BICUBIC = 3
NEXT_SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION_SIDES = range(384, 2304 + 1, 384)
ONEVISION_SIZES = tuple((height, width) for height in ONEVISION_SIDES for width in ONEVISION_SIDES)
ASPECT_RATIO = "anyres_max_9"


def read_llava_next(config: ImageConfig, model: dict[str, Any]) -> AnyresProcessor:
    """Read the settings. Raises ConfigError.

    The model keeps no embedding of a class token: of CLIP's tower "default" drops it.
    """
    check_settings(config, "do_center_crop")
    edge = edge_of(config, "size", 224, "shortest_edge")
    crop_size = config.get("crop_size", 224)
    is_cropped = config.flag("do_center_crop", True) or crop_size is not None
    if is_cropped and edge_of(config, "crop_size", 224, "shortest_edge") != edge:
        config.refuse("crop_size", f"the size of a tile, {edge}")
    vision = vision_of(model)
    has_class_token = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    side = _side(config, vision, edge)
    given = processor_integer(config, "patch_size", edge // side)
    check_equal(NESTED_FILE, "patch_size", given, "patch_size", edge // side)
    _check_strategy(model, "default" if has_class_token else "full")
    sizes = _sizes(config, model, edge, NEXT_SIZES)
    token = token_of(config, "image_token", "<image>")
    resample = resample_of(config, BICUBIC)
    return AnyresProcessor(edge, side, sizes, resample, None, None, token, token)


def read_llava_onevision(config: ImageConfig, model: dict[str, Any]) -> AnyresProcessor:
    """Read the settings. Raises ConfigError."""
    check_settings(config)
    edge = edge_of(config, "size", 384, "shortest_edge")
    if config.get("crop_size", None) is not None:
        config.refuse("crop_size", "null")
    side = _side(config, vision_of(model), edge)
    given = processor_integer(config, "num_image_tokens", side**2)
    check_equal(NESTED_FILE, "num_image_tokens", given, "patches of a tile", side**2)
    _check_strategy(model, "full")
    sizes = _sizes(config, model, edge, ONEVISION_SIZES)
    red, green, blue = config.colour("image_mean", CLIP_MEAN)
    background = (int(red * 255), int(green * 255), int(blue * 255))
    token = token_of(config, "image_token", "<image>")
    resample = resample_of(config, BICUBIC)
    max_tiles = _max_tiles(config, model)
    return AnyresProcessor(edge, side, sizes, resample, max_tiles, background, token, token)


def _side(config: ImageConfig, vision: dict[str, Any], edge: int) -> int:
    """Return the number of patches on a side of a tile. The tower cuts off what is over."""
    image_size = model_integer(vision, "image_size", edge)
    check_equal(config.file, "size", edge, "image_size", image_size)
    return max(1, edge // model_integer(vision, "patch_size", 14))


def _check_strategy(model: dict[str, Any], supported: str) -> None:
    strategy = model.get("vision_feature_select_strategy", supported)
    if strategy != supported:
        raise ConfigError(
            f"config.json has vision_feature_select_strategy = {strategy!r:.200}; "
            f"supported for its vision tower: {supported!r}."
        )


def _sizes(
    config: ImageConfig, model: dict[str, Any], edge: int, default: tuple[Size, ...]
) -> tuple[Size, ...]:
    """Return `image_grid_pinpoints`: heights and widths of whole tiles."""
    value = config.get("image_grid_pinpoints", [list(size) for size in default])
    sizes = _pairs(value)
    if not sizes or any(side % edge for size in sizes for side in size):
        config.refuse("image_grid_pinpoints", f"lists of two multiples of {edge}")
    name = "image_grid_pinpoints"
    check_equal(config.file, name, value, name, model.get(name) or value)
    return sizes


def _pairs(value: object) -> tuple[Size, ...]:
    """Return the pairs of positive numbers in a list, or () if it has anything else."""
    if not isinstance(value, list):
        return ()
    pairs: list[Size] = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(is_positive, pair)):
            return ()
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def _max_tiles(config: ImageConfig, model: dict[str, Any]) -> int:
    """Return n of `vision_aspect_ratio`, "anyres_max_n"."""
    name = "vision_aspect_ratio"
    value = model.get(name, ASPECT_RATIO)
    check_equal(NESTED_FILE, name, config.processor.get(name, ASPECT_RATIO), name, value)
    number = str(value).removeprefix("anyres_max_")
    if not number.isdecimal() or not int(number):
        raise ConfigError(f"config.json has {name} = {value!r:.200}; supported: anyres_max_N.")
    return int(number)
