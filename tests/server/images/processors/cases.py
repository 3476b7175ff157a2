"""Image processors of transformers, and ours with the same settings, for pictures of noise.

The reference is the `Pil` class of each family, without torchvision.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from engine.checkpoint.image_config import ImageConfig as Config
from engine.checkpoint.image_config import Normalization, normalization_of
from server.images.processors.processor import ImageShape, Processor
from server.images.processors.registry import processor_of

Pixels = NDArray[Any]

LARGE = ((1920, 1080), (3000, 2000), (4000, 20))  # width, height
ODD = (
    *((1, 1), (1, 7), (9, 1), (13, 14), (14, 13), (27, 29), (28, 28), (42, 300), (70, 70)),
    *((100, 100), (101, 99), (333, 15), (15, 333), (336, 336), (384, 384), (364, 364)),
    *((640, 480), (480, 640), (1000, 333), (333, 1000), (512, 512), (513, 511), (300, 211)),
    *((211, 300), (50, 1400), (9, 1400), (1400, 9), (897, 895), (1023, 257), (257, 1023), (31, 62)),
)


def _drawn_sizes() -> Iterator[tuple[int, int]]:
    draw = random.Random(63)
    for _ in range(30):
        yield draw.randint(20, 900), draw.randint(20, 900)


SIZES = (*ODD, *_drawn_sizes())


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint's settings: of the image processor, the processor around it and the model."""

    name: str
    architecture: str
    reference: Any
    values: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = SIZES
    call: dict[str, Any] = field(default_factory=dict)  # what transformers' processor passes
    alone: bool = True

    def pictures(self, size: tuple[int, int]) -> list[Image.Image]:
        """Return a conversation's pictures of noise, one of them if the case is alone."""
        return [noise(*size)] * (1 if self.alone else 2)

    @property
    def config(self) -> Config:
        return Config(self.values, "preprocessor_config.json", self.processor)

    @property
    def ours(self) -> Processor:
        return processor_of(self.model, self.config, self.architecture)

    @property
    def normalization(self) -> Normalization:
        return normalization_of(self.config, self.architecture)

    def process(self, picture: Image.Image) -> tuple[ImageShape, Pixels]:
        """Return our shape and pixels [tiles, height, width, 3]."""
        shape, pixels = self.ours.process(picture, alone=self.alone)
        array = np.frombuffer(pixels, np.uint8)
        return shape, array.reshape(shape.tiles, shape.height, shape.width, 3)

    def reference_of(self, *pictures: Image.Image, **settings: Any) -> Any:
        """Return what transformers' image processor makes of the pictures of one conversation."""
        images = pictures[0] if len(pictures) == 1 else [list(pictures)]
        processor = self.reference(**self.values)
        return processor(images, **settings, **self.call, return_tensors="np")

    def expected(self, found: Any) -> Pixels:
        """Return the first picture [tiles, height, width, 3] of transformers' output."""
        values = np.asarray(found["pixel_values"])
        if "image_grid_thw" in found:
            return _of_qwen_patches(values, found["image_grid_thw"][0], self.model)
        if "image_position_ids" in found:
            return _of_gemma4_patches(values[0], found["image_position_ids"][0])
        tiles = values if values.ndim == 4 else values[0]
        return tiles.transpose(0, 2, 3, 1)


def _of_qwen_patches(patches: Pixels, grid: Pixels, model: dict[str, Any]) -> Pixels:
    side = model["vision_config"]["patch_size"]
    _, rows, columns = (int(number) for number in grid)
    units = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)
    assert np.array_equal(units[..., 0, :, :], units[..., 1, :, :])
    image = units[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return image.reshape(1, rows * side, columns * side, 3)


def _of_gemma4_patches(patches: Pixels, positions: Pixels) -> Pixels:
    columns, rows = (int(number) + 1 for number in positions.max(axis=0))
    used = patches[: rows * columns]
    assert (positions[rows * columns :] == -1).all()
    image = used.reshape(rows, columns, 16, 16, 3).transpose(0, 2, 1, 3, 4)
    return image.reshape(1, rows * 16, columns * 16, 3)


def _qwen(patch_size: int) -> dict[str, Any]:
    sizes = {"patch_size": patch_size, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {"vision_config": sizes}


def _idefics3(edge: int, patch_size: int, tiles: int) -> dict[str, Any]:
    values = {"size": {"longest_edge": edge * tiles}, "max_image_size": {"longest_edge": edge}}
    model = {"vision_config": {"patch_size": patch_size}, "scale_factor": 2}
    side = edge // patch_size // 2
    return {
        "values": values,
        "model": model,
        "processor": {"image_seq_len": side**2},
        "call": {"return_row_col_info": True},
    }


RAW = {"do_rescale": False, "do_normalize": False}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN3_SIZE = {"shortest_edge": 65536, "longest_edge": 16777216}
ONEVISION = {
    "architecture": "LlavaOnevisionForConditionalGeneration",
    "reference": LlavaOnevisionImageProcessorPil,
    "values": HALF,
    "processor": {"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    "model": {"vision_config": {"image_size": 384, "patch_size": 14}},
}
NEXT_SIZES = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
PIXTRAL = {"patch_size": 14, "spatial_merge_size": 2}
CASES = (
    Case(
        "idefics3", "Idefics3ForConditionalGeneration", Idefics3ImageProcessorPil,
        **_idefics3(60, 10, 4), sizes=(*SIZES, *LARGE),
    ),
    Case(
        "smolvlm", "SmolVLMForConditionalGeneration", SmolVLMImageProcessorPil,
        **_idefics3(72, 12, 7), sizes=(*SIZES, *LARGE),
    ),
    Case(
        "smolvlm-released", "SmolVLMForConditionalGeneration", SmolVLMImageProcessorPil,
        **_idefics3(512, 16, 4), sizes=((640, 480), (333, 1000), (1, 1)),
    ),
    Case(
        "idefics3-whole", "Idefics3ForConditionalGeneration", Idefics3ImageProcessorPil,
        **(_idefics3(60, 10, 4) | {"values": {
            "size": {"longest_edge": 240}, "max_image_size": {"longest_edge": 60},
            "do_image_splitting": False,
        }}),
    ),
    Case(
        "gemma3", "Gemma3ForConditionalGeneration", Gemma3ImageProcessorPil,
        values={"size": {"height": 448, "width": 448}},
        model={"vision_config": {"image_size": 448}}, sizes=(*SIZES, *LARGE),
    ),
    Case(
        "onevision", **ONEVISION, sizes=(*SIZES[::2], *LARGE[::2]),
    ),
    Case("onevision-of-several", **ONEVISION, alone=False, sizes=(*SIZES, LARGE[0])),
    Case(
        "llava-next", "LlavaNextForConditionalGeneration", LlavaNextImageProcessorPil,
        values=NEXT_SIZES, model={"vision_config": {"image_size": 336, "patch_size": 14}},
        processor={"patch_size": 14}, sizes=(*SIZES, *LARGE),
    ),
    Case(
        "qwen2.5-vl", "Qwen2_5_VLForConditionalGeneration", Qwen2VLImageProcessorPil,
        values={"min_pixels": 3136, "max_pixels": 28 * 28 * 1280}, model=_qwen(14),
        sizes=(*SIZES, *LARGE, (14, 2000), (15, 2000), (200, 1)),
    ),
    Case(
        "qwen3-vl", "Qwen3VLForConditionalGeneration", Qwen2VLImageProcessorPil,
        values={"size": QWEN3_SIZE, "patch_size": 16, **HALF}, model=_qwen(16),
        sizes=(*SIZES, LARGE[0], LARGE[2], (16, 2000), (17, 2000)),
    ),
    Case(
        "mistral3", "Mistral3ForConditionalGeneration", PixtralImageProcessorPil,
        values={"size": {"longest_edge": 1540}}, processor=PIXTRAL,
        model={"vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
        call={"patch_size": 28}, sizes=(*SIZES, *LARGE),
    ),
    Case(
        "gemma4", "Gemma4ForConditionalGeneration", Gemma4ImageProcessorPil,
        model={"vision_config": {}}, sizes=(*SIZES, *LARGE),
    ),
    Case(
        "gemma4-70", "Gemma4ForConditionalGeneration", Gemma4ImageProcessorPil,
        values={"max_soft_tokens": 70}, model={"vision_config": {}},
    ),
)  # fmt: skip
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def noise(width: int, height: int) -> Image.Image:
    """Return a picture in mode RGB, the same on every machine."""
    data = random.Random(f"{width}x{height}").randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), data)


@contextmanager
def pillow_12_3_order() -> Iterator[None]:
    """Let every call of Image.resize resize the sides in the order of Pillow 12.3."""
    original = Image.Image.resize

    def resize(self: Image.Image, size: Any, resample: Any = None, **settings: Any) -> Image.Image:
        width, height = size
        height_first = self.height > self.width * 100 and height < self.height
        between = (self.width, height) if height_first else (width, self.height)
        return original(original(self, between, resample, **settings), size, resample, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", resize)
        yield
