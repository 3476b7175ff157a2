"""Bytes of pictures become the numbers that transformers' Pillow backend makes, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.checkpoint.image_config import HALF
from engine.errors import ConfigError
from engine.models.vision.pixels import Normalization, patches
from tests.support.vision import IMAGE_PROCESSOR, numbers_of, picture

EVERY_BYTE = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(-1, -1, -1, 3)


def in_rows(pixels: torch.Tensor) -> torch.Tensor:
    """Return tiles of one patch each, [tiles, 1, 3, P]."""
    return patches(pixels, pixels.shape[1])


@pytest.mark.usefixtures("one_thread")
def test_every_byte_has_the_bits_of_the_reference() -> None:
    pytest.importorskip("transformers")
    normalization = Normalization.from_hf(IMAGE_PROCESSOR, HALF, HALF)
    found = normalization(in_rows(EVERY_BYTE), torch.float32)
    expected = numbers_of(EVERY_BYTE)
    assert torch.equal(found.view_as(expected), expected)
    rounded = normalization(in_rows(EVERY_BYTE), torch.bfloat16)
    assert torch.equal(rounded, found.bfloat16())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [-1.0, 1.0]),
        ({"do_normalize": False}, [0.0, 1.0]),
        ({"do_rescale": False, "do_normalize": False}, [0.0, 255.0]),
        ({"do_rescale": False, "image_mean": 5.0, "image_std": 2.0}, [-2.5, 125.0]),
        ({"rescale_factor": 1 / 127.5}, [-1.0, 3.0]),
        ({"do_rescale": None, "do_normalize": None}, [0.0, 255.0]),  # off, as in transformers
    ],
)
def test_each_setting_of_the_image_processor_is_applied(
    config: dict[str, Any], expected: list[float]
) -> None:
    normalization = Normalization.from_hf(config, HALF, HALF)
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).expand(1, 3, 2)
    assert normalization(black_and_white, torch.float32)[0, 1].tolist() == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_std", [0.5, 0.0, 0.5]),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", "half"),
        ("image_std", None),
        ("rescale_factor", [1.0, 1.0]),
        ("rescale_factor", float("nan")),
        ("image_std", [True, 1.0, 1.0]),
    ],
)
def test_a_setting_that_is_no_number_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        Normalization.from_hf({key: value}, HALF, HALF)


def test_patches_are_those_of_a_convolution() -> None:
    pixels = picture((2, 11, 15))  # 8 x 12 are whole squares
    squares = patches(pixels, 4)
    kernel = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    convolved = torch.nn.functional.conv2d(pixels.permute(0, 3, 1, 2).float(), kernel, stride=4)
    product = squares.flatten(2).float() @ kernel.flatten(1).T
    assert squares.shape == (2, 6, 3, 16)
    torch.testing.assert_close(product, convolved.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-3)
