"""Pictures for Gemma 4, and the reference's arguments for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.seeing import Shown
from tests.support.vision import picture

PATCH, POOL, BUDGET = 4, 3, 12  # of the tiny towers: pixels, patches along a side, embeddings
PROCESSOR = {"max_soft_tokens": BUDGET, "patch_size": PATCH, "pooling_kernel_size": POOL}


def shown(rows: int, columns: int, seed: int) -> Shown:
    """Return a random picture with a grid of rows x columns embeddings."""
    unit = PATCH * POOL
    pixels = picture((1, rows * unit, columns * unit), seed)
    return Shown(pixels, rows * columns, (rows, columns))


def padded(numbers: torch.Tensor, patch: int, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return patches and positions of [1, 3, height, width] as Gemma4ImageProcessor makes them."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        convert_image_to_patches,
        pad_along_first_dim,
    )

    patches = convert_image_to_patches(numbers[0].double().numpy(), patch)
    rows, columns = numbers.shape[2] // patch, numbers.shape[3] // patch
    places = [[column, row] for row in range(rows) for column in range(columns)]
    found = pad_along_first_dim(patches, torch.tensor(places).numpy(), BUDGET * pool**2)
    pixels, positions = (torch.as_tensor(each)[None] for each in found)
    return pixels.to(torch.promote_types(numbers.dtype, torch.float32)), positions


def vision_inputs(images: Sequence[Shown]) -> dict[str, Any]:
    """Return the reference's arguments for the pictures of a prompt."""
    rescaled = [(each.pixels.double() / 255).float().permute(0, 3, 1, 2) for each in images]
    pairs = [padded(numbers, PATCH, POOL) for numbers in rescaled]
    pixels, positions = zip(*pairs, strict=True)
    return {"pixel_values": torch.cat(pixels), "image_position_ids": torch.cat(positions)}
