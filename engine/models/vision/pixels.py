"""From the bytes of a picture to the numbers that a tower reads."""

from __future__ import annotations

from typing import Any, Self

import torch

from engine.checkpoint import image_config
from engine.checkpoint.image_config import (
    Colour,
    ImageConfig,
    read_normalization,
)

CHANNELS, LEVELS = 3, 256


class Normalization(image_config.Normalization):
    """The scale, mean and standard deviation of an image processor's config, for tensors.

    transformers' Pillow backend applies them one after the other, as here. Its torchvision backend
    fuses the three, with other last bits.
    """

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], mean: Colour, std: Colour, *, normalizes: bool = True
    ) -> Self:
        """Read an image processor's config; `mean`, `std` and `normalizes` are its class's
        defaults.

        Raises ConfigError for values that are no numbers, or a standard deviation of 0.
        """
        given = ImageConfig(config, "The image processor's config", {})
        read = read_normalization(given, mean, std, normalizes=normalizes)
        return cls(read.scale, read.mean, read.std)

    def __call__(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pixels uint8 [..., 3, P] -> [..., 3, P], computed in fp32 and rounded to `dtype`.

        A table has the number of each level of each channel.
        """
        levels = torch.arange(LEVELS, device=pixels.device)
        numbers = (levels.double() * self.scale).float()
        mean, std = (numbers.new_tensor(x)[:, None] for x in (self.mean, self.std))
        table = numbers.sub(mean).div_(std).to(dtype).flatten()  # [3 * LEVELS]
        firsts = torch.arange(0, len(table), LEVELS, dtype=torch.int32, device=pixels.device)
        places = pixels.int() + firsts[:, None]
        return table.index_select(0, places.flatten()).view(pixels.shape)


def patches(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Cut tiles [tiles, height, width, 3] into squares: [tiles, rows * columns, 3, size * size].

    The order in a square is that of a convolution's kernel: channel, row, column. As in a
    convolution, pixels behind the last whole square are left out.
    """
    rows, columns = (length // size for length in pixels.shape[1:3])
    whole = pixels[:, : rows * size, : columns * size]
    squares = whole.unflatten(2, (columns, size)).unflatten(1, (rows, size))
    ordered = squares.permute(0, 1, 3, 5, 2, 4)
    return ordered.reshape(len(pixels), rows * columns, CHANNELS, size * size)
