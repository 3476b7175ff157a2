"""Gemma 3: every picture becomes one square, and loses its proportions."""

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
    vision_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR = 2


@dataclass(frozen=True)
class Gemma3Processor:
    """One square tile; its embeddings are a square too."""

    edge: int
    resample: int
    embeddings: int
    marker: str = "<start_of_image>"
    placeholder: str = "<image_soft_token>"

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        """Resize to the square."""
        square = resized(picture, self.edge, self.edge, self.resample)
        side = math.isqrt(self.embeddings)
        size = (picture.height, picture.width)
        shape = ImageShape(1, self.edge, self.edge, side, side, self.embeddings, size)
        return shape, square.tobytes()

    def expansion(self, shape: ImageShape) -> str:
        """Return the placeholders between the tokens of begin and end, and two newlines."""
        return f"\n\n{self.marker}{self.placeholder * shape.embeddings}<end_of_image>\n\n"

    def grids(self, shape: ImageShape) -> Sequence[PatchGrid]:
        """Return one grid."""
        return one_grid(shape)


def read_gemma3(config: ImageConfig, model: dict[str, Any]) -> Gemma3Processor:
    """Read the settings. Raises ConfigError.

    `do_pan_and_scan`, which adds crops of the picture and English words, is refused. transformers'
    Gemma3Processor ignores it in a file and takes it from its caller only.
    """
    check_settings(config)
    edge = edge_of(config, "size", 224)
    vision = vision_of(model)
    check_equal(config.file, "size", edge, "image_size", model_integer(vision, "image_size", 224))
    embeddings = model_integer(model, "mm_tokens_per_image", 256)
    given = processor_integer(config, "image_seq_length", 256)
    check_equal(NESTED_FILE, "image_seq_length", given, "mm_tokens_per_image", embeddings)
    return Gemma3Processor(edge, resample_of(config, BILINEAR), embeddings)
