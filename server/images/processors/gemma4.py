"""Gemma 4: pictures keep their proportions and fill a budget of embeddings, as one tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.checkpoint.image_config import ImageConfig
from server.images.processors.processor import ImageShape, PatchGrid, one_grid
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
BUDGETS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True)
class Gemma4Processor:
    """One tile, whose grid of embeddings has one for each pool of `unit` x `unit` pixels."""

    unit: int
    budget: int  # embeddings
    resample: int
    marker: str = "<|image|>"
    placeholder: str = "<|image|>"

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        """Resize to the largest whole units within the budget."""
        rows, columns = self._grid(picture.width, picture.height)
        height, width = rows * self.unit, columns * self.unit
        whole = resized(picture, width, height, self.resample)
        size = (picture.height, picture.width)
        shape = ImageShape(1, height, width, rows, columns, rows * columns, size)
        return shape, whole.tobytes()

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns. A strip that would have none has one, and is distorted."""
        scale = math.sqrt(self.budget * self.unit**2 / (height * width))
        rows = math.floor(scale * height / self.unit)
        columns = math.floor(scale * width / self.unit)
        if not rows:
            rows, columns = 1, min(width // height, self.budget)
        elif not columns:
            rows, columns = min(height // width, self.budget), 1
        return rows, columns

    def expansion(self, shape: ImageShape) -> str:
        """Return the placeholders between the tokens of begin and end."""
        return f"<|image>{self.placeholder * shape.embeddings}<image|>"

    def grids(self, shape: ImageShape) -> Sequence[PatchGrid]:
        """Return one grid."""
        return one_grid(shape)


def read_gemma4(config: ImageConfig, model: dict[str, Any]) -> Gemma4Processor:
    """Read the settings. Raises ConfigError."""
    check_settings(config)
    vision = vision_of(model)
    for name, default in (("patch_size", 16), ("pooling_kernel_size", 3)):
        given = config.integer(name, default)
        check_equal(config.file, name, given, name, model_integer(vision, name, default))
    budget = config.integer("max_soft_tokens", 280)
    if budget not in BUDGETS:
        config.refuse("max_soft_tokens", ", ".join(map(str, BUDGETS)))
    unit = config.integer("patch_size", 16) * config.integer("pooling_kernel_size", 3)
    return Gemma4Processor(unit, budget, resample_of(config, BICUBIC))
