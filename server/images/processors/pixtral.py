"""Mistral 3, with Pixtral's tower: pictures keep their proportions, and only shrink."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.checkpoint.image_config import NESTED_FILE, ImageConfig
from server.images.processors.processor import ImageShape, PatchGrid, one_grid
from server.images.processors.resize import resized
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

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC = 3


@dataclass(frozen=True)
class PixtralProcessor:
    """One tile, whose grid of embeddings has one for each merged unit of `unit` x `unit` pixels."""

    longest_edge: int
    unit: int
    resample: int
    marker: str = "[IMG]"
    placeholder: str = "[IMG]"
    row_end: str = "[IMG_BREAK]"
    image_end: str = "[IMG_END]"

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        """Shrink to the longest edge and round up to whole units. Raises UnfitPictureError."""
        width, height = picture.size
        ratio = max(width, height) / self.longest_edge
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        rows, columns = math.ceil(height / self.unit), math.ceil(width / self.unit)
        height, width = rows * self.unit, columns * self.unit
        whole = resized(picture, width, height, self.resample)
        size = (picture.height, picture.width)
        shape = ImageShape(1, height, width, rows, columns, rows * columns, size)
        return shape, whole.tobytes()

    def expansion(self, shape: ImageShape) -> str:
        """Return the placeholders, with a token behind each row and another behind the last."""
        row = self.placeholder * shape.columns
        return self.row_end.join([row] * shape.rows) + self.image_end

    def grids(self, shape: ImageShape) -> Sequence[PatchGrid]:
        """Return one grid."""
        return one_grid(shape)


def read_pixtral(config: ImageConfig, model: dict[str, Any]) -> PixtralProcessor:
    """Read the settings. Raises ConfigError.

    The size of a unit is that of processor_config.json: transformers passes it to the image
    processor, whose `patch_size` has no effect.
    """
    check_settings(config)
    vision = vision_of(model)
    patch_size = processor_integer(config, "patch_size", 16)
    of_model = model_integer(vision, "patch_size", patch_size)
    check_equal(NESTED_FILE, "patch_size", patch_size, "patch_size", of_model)
    name = "spatial_merge_size"
    merge_size = processor_integer(config, name, 1)
    check_equal(NESTED_FILE, name, merge_size, name, model_integer(model, name, 2))
    return PixtralProcessor(
        edge_of(config, "size", 1024, "longest_edge"),
        patch_size * merge_size,
        resample_of(config, BICUBIC),
        token_of(config, "image_token", "[IMG]"),
        token_of(config, "image_token", "[IMG]"),
        token_of(config, "image_break_token", "[IMG_BREAK]"),
        token_of(config, "image_end_token", "[IMG_END]"),
    )
