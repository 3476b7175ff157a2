"""Pixels and tokens of our image processors are those of transformers' `Pil` classes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import PIL
import pytest
from packaging.version import Version

from tests.server.images.processors.cases import (
    RAW,
    Case,
    Pixels,
    by_case,
    noise,
    pillow_12_3_order,
)
from tests.server.images.processors.prompts import reference_prompt

RECORDED = Path(__file__).with_name("pixels_pillow_12_3.json")
# Largest difference of values of 0 to 255 between Pillow 12.3 and 13. Measured: 28, with Lanczos.
MAX_LEVELS = 30


@by_case
@pytest.mark.variants(2)
def test_pixels_and_text_of_each_size_equal_the_reference_in_pillow_12_3_order(
    case: Case,
) -> None:
    prompt = reference_prompt(case)
    for size in case.sizes:
        with pillow_12_3_order():
            found = case.reference_of(*case.pictures(size), **RAW)
        shape, pixels = case.process(noise(*size))
        expected = case.expected(found)
        assert expected.shape == pixels.shape, size
        assert np.array_equal(expected, pixels), size
        text = prompt.replace_image_token(found, 0)
        assert case.ours.expansion(shape) == text, size
        assert shape.embeddings == text.count(case.ours.placeholder), size
        assert shape.size == (size[1], size[0])


@by_case
@pytest.mark.variants(4)
def test_pixels_have_the_digests_recorded_with_pillow_12_3(case: Case) -> None:
    recorded = json.loads(RECORDED.read_text())["digests"][case.name]
    found = {}
    for size in case.sizes:
        _, pixels = case.process(noise(*size))
        found[f"{size[0]}x{size[1]}"] = digest_of(pixels)
    assert found == recorded


def digest_of(pixels: Pixels) -> str:
    return hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest()


@by_case
def test_normalised_pixels_equal_the_reference_bit_by_bit(case: Case) -> None:
    """With values of fp32, as the engine computes them."""
    with pillow_12_3_order():
        found = case.reference_of(*case.pictures((83, 61)))
    expected = case.expected(found)
    _, pixels = case.process(noise(83, 61))
    settings = case.normalization
    scaled = (pixels.astype(np.float64) * settings.scale).astype(np.float32)
    mean, std = (np.array(each, np.float32) for each in (settings.mean, settings.std))
    assert np.array_equal((scaled - mean) / std, expected)


@by_case
@pytest.mark.variants(3)
def test_pixels_are_near_those_of_the_installed_pillow(case: Case) -> None:
    """Pillow 13 resizes some pictures in another order. Noise shows it most."""
    for size in case.sizes[::4]:
        expected = case.expected(case.reference_of(*case.pictures(size), **RAW))
        _, pixels = case.process(noise(*size))
        difference = np.abs(expected.astype(np.int16) - pixels)
        assert difference.max() <= MAX_LEVELS, size
        if Version(PIL.__version__) < Version("13"):
            assert not difference.any(), size


@by_case
@pytest.mark.variants(4)
def test_prompts_of_zero_one_and_three_images_equal_the_reference(case: Case) -> None:
    prompt = reference_prompt(case)
    ours = case.ours
    for count in (0, 1, 3):
        pictures = [noise(*size) for size in ((83, 61), (301, 40), (40, 97))][:count]
        text = "\n".join(["a", *[f"b{ours.marker}"] * count, "c"])
        images = [pictures] if pictures else None
        expected = prompt(images=images, text=[text])["input_ids"]
        shapes = [ours.process(picture, alone=count == 1)[0] for picture in pictures]
        first, *others = text.split(ours.marker)
        parts = [ours.expansion(shape) + part for shape, part in zip(shapes, others, strict=True)]
        ids = prompt.tokenizer("".join([first, *parts]))["input_ids"]
        assert ids == np.asarray(expected)[0].tolist(), count
