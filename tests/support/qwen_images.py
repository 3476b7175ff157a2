"""Pictures for Qwen's models, and the reference's arguments for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.seeing import Shown
from tests.support.vision import numbers_of, picture

PATCH, MERGE, FRAMES = 6, 2, 2  # of the tiny towers: pixels of a patch, patches of an embedding


def shown(rows: int, columns: int, seed: int) -> Shown:
    """Return a random picture with a grid of rows x columns embeddings."""
    unit = PATCH * MERGE
    pixels = picture((1, rows * unit, columns * unit), seed)
    return Shown(pixels, rows * columns, (rows, columns))


def in_merge_order(numbers: torch.Tensor, patch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return patches and grid as transformers' Qwen2VLImageProcessor makes them.

    The steps are those of its `_preprocess`, from the numbers on.
    """
    _, _, height, width = numbers.shape
    rows, columns = height // patch, width // patch
    repeated = numbers.repeat(FRAMES, 1, 1, 1)
    shape = (1, FRAMES, 3, rows // MERGE, MERGE, patch, columns // MERGE, MERGE, patch)
    ordered = repeated.reshape(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    grid = torch.tensor([[1, rows, columns]])
    return ordered.reshape(rows * columns, 3 * FRAMES * patch * patch), grid


def vision_inputs(images: Sequence[Shown]) -> dict[str, Any]:
    """Return the reference's arguments for the pictures of a prompt."""
    pairs = [in_merge_order(numbers_of(each.pixels), PATCH) for each in images]
    patches, grids = zip(*pairs, strict=True)
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.cat(grids)}
