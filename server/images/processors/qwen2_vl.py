"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures keep their proportions, as one tile.

Both sides become multiples of a merged unit of patches, and the area stays within two limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.checkpoint.image_config import ImageConfig, is_positive
from server.images.processors.processor import ImageShape, PatchGrid, UnfitPictureError, one_grid
from server.images.processors.resize import resized
from server.images.processors.settings import (
    check_equal,
    check_settings,
    model_integer,
    resample_of,
    vision_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC = 3
MAX_RATIO = 200  # of the longer side to the shorter one
DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # pixels


@dataclass(frozen=True)
class Qwen2VLProcessor:
    """One tile, whose grid of embeddings has one for each merged unit of `unit` x `unit` pixels."""

    unit: int
    min_pixels: int
    max_pixels: int
    resample: int
    marker: str = "<|image_pad|>"
    placeholder: str = "<|image_pad|>"

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        """Resize to whole units. Raises UnfitPictureError for a strip of more than 200 to 1."""
        width, height = self._size(picture.width, picture.height)
        whole = resized(picture, width, height, self.resample)
        rows, columns = height // self.unit, width // self.unit
        size = (picture.height, picture.width)
        shape = ImageShape(1, height, width, rows, columns, rows * columns, size)
        return shape, whole.tobytes()

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Return the resized width and height: `smart_resize` of transformers.

        Half a unit rounds to even, and a side may round to 0. Its area then counts as too small.
        """
        if max(width, height) / min(width, height) > MAX_RATIO:
            raise UnfitPictureError(
                f"The image of {width} x {height} pixels is too long and thin for this model: one "
                f"side may be {MAX_RATIO} times the other at most."
            )
        unit = self.unit
        new_width, new_height = round(width / unit) * unit, round(height / unit) * unit
        if new_width * new_height > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            new_width = max(unit, math.floor(width / shrink / unit) * unit)
            new_height = max(unit, math.floor(height / shrink / unit) * unit)
        elif new_width * new_height < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            new_width = math.ceil(width * grow / unit) * unit
            new_height = math.ceil(height * grow / unit) * unit
        return new_width, new_height

    def expansion(self, shape: ImageShape) -> str:
        """Return the placeholders. The template writes the tokens around them."""
        return self.placeholder * shape.embeddings

    def grids(self, shape: ImageShape) -> Sequence[PatchGrid]:
        """Return one grid."""
        return one_grid(shape)


def read_qwen2_vl(config: ImageConfig, model: dict[str, Any]) -> Qwen2VLProcessor:
    """Read the settings. Raises ConfigError."""
    check_settings(config)
    vision = vision_of(model)
    for name, model_name, default in (
        ("patch_size", "patch_size", 14),
        ("merge_size", "spatial_merge_size", 2),
        ("temporal_patch_size", "temporal_patch_size", 2),
    ):
        given = config.integer(name, default)
        check_equal(config.file, name, given, model_name, model_integer(vision, model_name, given))
    min_pixels, max_pixels = _pixel_limits(config)
    unit = config.integer("patch_size", 14) * config.integer("merge_size", 2)
    return Qwen2VLProcessor(unit, min_pixels, max_pixels, resample_of(config, BICUBIC))


def _pixel_limits(config: ImageConfig) -> tuple[int, int]:
    """Return the smallest and the largest area, in pixels.

    `min_pixels` and `max_pixels`, outside of `size`, replace its edges.
    """
    size = config.get("size", None)
    size = DEFAULT_SIZE if size is None else size
    if not isinstance(size, dict):
        config.refuse("size", '{"shortest_edge": n, "longest_edge": n}, in pixels')
    limits = dict(size)
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if config.get(name, None) is not None:
            limits[edge] = config.integer(name, 1)
            limits.pop(name, None)
    if limits.keys() != DEFAULT_SIZE.keys() or not all(map(is_positive, limits.values())):
        config.refuse("size", '{"shortest_edge": n, "longest_edge": n}, in pixels')
    return limits["shortest_edge"], limits["longest_edge"]
