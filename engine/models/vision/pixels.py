"""From the bytes of a picture to the numbers that a tower reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from engine.errors import ConfigError

CHANNELS = 3
HALF = (0.5, 0.5, 0.5)
OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """The factor, mean and standard deviation of an image processor's config.

    transformers' Pillow backend applies them one after the other: byte * factor, rounded to fp32,
    then minus the mean and divided by the standard deviation in fp32. Its torchvision backend fuses
    the three, with other last bits.
    """

    factor: float | None  # None: bytes are not rescaled
    mean: tuple[float, ...] | None  # of red, green and blue; None: they are not normalised
    std: tuple[float, ...] | None

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]
    ) -> Self:
        """Read an image processor's config; `mean` and `std` are the defaults of its class.

        Raises ConfigError for values that are no numbers, or a standard deviation of 0.
        """
        rescales = config.get("do_rescale", True) is not False
        normalizes = config.get("do_normalize", True) is not False
        factor = _numbers(config, "rescale_factor", [1 / 255], 1)[0]
        means = _numbers(config, "image_mean", mean, CHANNELS)
        deviations = _numbers(config, "image_std", std, CHANNELS)
        if 0 in deviations:
            raise ConfigError("The image processor's config has 0 in image_std.")
        return cls(
            factor=factor if rescales else None,
            mean=means if normalizes else None,
            std=deviations if normalizes else None,
        )

    def __call__(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pixels uint8 [..., 3, P] -> [..., 3, P], computed in fp32 and rounded to `dtype`."""
        numbers = pixels.float() if self.factor is None else (pixels.double() * self.factor).float()
        if self.mean is not None and self.std is not None:
            mean, std = (numbers.new_tensor(x)[:, None] for x in (self.mean, self.std))
            numbers = numbers.sub_(mean).div_(std)
        return numbers.to(dtype)


def _numbers(
    config: Mapping[str, Any], key: str, default: Sequence[float], count: int
) -> tuple[float, ...]:
    """Return `count` numbers: one that is given stands for all."""
    given = default if config.get(key) is None else config[key]
    values: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * count
    are_numbers = all(type(x) in (int, float) and math.isfinite(x) for x in values)
    if not are_numbers or len(values) != count:
        raise ConfigError(
            f"The image processor's config has {key} = {given!r:.80}; it must be {count} numbers."
        )
    return tuple(float(x) for x in values)


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
