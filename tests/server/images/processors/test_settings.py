"""Settings of image processors are applied or refused by name; strips never break a processor."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError
from server.images.processors.processor import UnfitPictureError
from server.images.processors.resize import resized
from tests.server.images.processors.cases import CASES, RAW, Case, by_case, noise, pillow_12_3_order

BY_NAME = {case.name: case for case in CASES}
Values = dict[str, Any]


def changed(name: str, values: Values, processor: Values | None = None) -> Case:
    case = BY_NAME[name]
    return dataclasses.replace(
        case, values={**case.values, **values}, processor={**case.processor, **(processor or {})}
    )


def assert_equal_to_reference(case: Case, size: tuple[int, int]) -> None:
    with pillow_12_3_order():
        expected = case.expected(case.reference_of(*case.pictures(size), **RAW))
    _, pixels = case.process(noise(*size))
    assert np.array_equal(expected, pixels)


@pytest.mark.parametrize("resample", range(6))
@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl", "idefics3", "llava-next"])
def test_each_filter_of_pillow_equals_the_reference(name: str, resample: int) -> None:
    assert_equal_to_reference(changed(name, {"resample": resample}), (211, 137))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("qwen2.5-vl", {"size": {"shortest_edge": 9, "longest_edge": 9999}, "max_pixels": None}),
        ("qwen2.5-vl", {"size": {"min_pixels": 9, "max_pixels": 9}, "max_pixels": 50_000}),
        ("qwen2.5-vl", {"min_pixels": None, "max_pixels": 50_000}),
        ("qwen2.5-vl", {"min_pixels": 300_000}),
        ("gemma3", {"size": 448}),
        ("gemma3", {"size": {"height": 448, "width": 448}, "do_pan_and_scan": None}),
        ("onevision", {"size": 384}),
        ("onevision", {"size": {"shortest_edge": 384}}),
        ("onevision", {"image_grid_pinpoints": [[768, 384], [384, 384]]}),
        ("onevision-of-several", {"image_mean": [0.1, 0.7, 0.999]}),
        ("llava-next", {"size": 336, "crop_size": 336, "do_center_crop": False}),
        ("mistral3", {"size": 300}),
        ("mistral3", {"size": {"height": 300, "width": 300}, "patch_size": 5}),
        ("idefics3", {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 60}}),
        ("gemma4", {"max_soft_tokens": 1120}),
        *((name, {"do_pad": False, "do_convert_rgb": True}) for name in BY_NAME),
        ("idefics3", {"do_image_splitting": None}),
        ("llava-next", {"do_center_crop": None, "crop_size": None}),
        ("qwen2.5-vl", {"size": None, "crop_size": None, "pad_size": None, "do_center_crop": None}),
    ],
)
@pytest.mark.variants(10)
def test_settings_that_are_applied_equal_the_reference(name: str, values: Values) -> None:
    assert_equal_to_reference(changed(name, values), (233, 140))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gemma3", {"do_resize": False}, "do_resize = False; supported: true"),
        ("gemma3", {"do_resize": None}, "do_resize = None; supported: true"),
        ("gemma3", {"size": None}, "size = None; supported: n, "),
        ("llava-next", {"crop_size": None}, "crop_size = None; supported: n, "),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan = True; supported: false"),
        ("gemma3", {"do_center_crop": True}, "do_center_crop = True; supported: false"),
        ("gemma3", {"do_pan_and_scan": "no"}, "do_pan_and_scan = 'no'; supported: true and false"),
        ("gemma3", {"size": {"shortest_edge": 448}}, "size = .*; supported: n, "),
        ("gemma3", {"size": {"height": 448, "width": 224}}, "size = "),
        ("gemma3", {"size": 224}, "size = 224, but config.json has image_size = 448"),
        ("gemma3", {"resample": 6}, "resample = 6; supported: Pillow's filters, 0 to 5"),
        ("gemma3", {"resample": None}, "resample = None"),
        ("gemma3", {"resample": "bicubic"}, "resample = 'bicubic'"),
        ("gemma3", {"size_divisor": 32}, "size_divisor = 32; supported: null"),
        ("qwen3-vl", {"pad_size": {"height": 9, "width": 9}}, "pad_size = "),
        ("qwen3-vl", {"do_image_splitting": True}, "do_image_splitting = True"),
        ("qwen3-vl", {"size": {"min_pixels": 9, "max_pixels": 99}}, "size = .*in pixels"),
        ("qwen3-vl", {"size": {"longest_edge": 99}}, "size = "),
        ("qwen3-vl", {"size": {"shortest_edge": 0, "longest_edge": 99}}, "size = "),
        ("qwen3-vl", {"size": 448}, "size = "),
        ("qwen3-vl", {"max_pixels": "9"}, "max_pixels = '9'; supported: whole numbers"),
        ("qwen3-vl", {"patch_size": 14}, "patch_size = 14, but config.json has patch_size = 16"),
        ("qwen3-vl", {"merge_size": 1}, "merge_size = 1, but config.json has spatial_merge_size"),
        ("qwen3-vl", {"temporal_patch_size": 1}, "temporal_patch_size = 1, but"),
        ("idefics3", {"size": {"height": 60, "width": 60}}, 'size = .*{"longest_edge": n}'),
        ("idefics3", {"max_image_size": {"longest_edge": 50}}, "max_image_size = 50, which makes"),
        ("onevision", {"crop_size": 384}, "crop_size = 384; supported: null"),
        ("onevision", {"image_grid_pinpoints": [[384, 400]]}, "image_grid_pinpoints = "),
        ("onevision", {"image_grid_pinpoints": []}, "image_grid_pinpoints = "),
        ("onevision", {"image_grid_pinpoints": [384]}, "image_grid_pinpoints = "),
        ("llava-next", {"crop_size": {"height": 224, "width": 224}}, "crop_size = .*tile, 336"),
        ("mistral3", {"size": {"shortest_edge": 1540}}, "size = "),
        ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens = 100; supported: 70, 140, 280"),
        ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size = 2, but"),
        (
            "gemma4",
            {"image_processor_type": "Gemma3ImageProcessor"},
            "image_processor_type = 'Gemma3ImageProcessor'; supported: Gemma4ImageProcessor for",
        ),
        ("gemma4", {"image_processor_type": "ViTImageProcessor"}, "image_processor_type = "),
    ],
)
def test_other_settings_are_refused_by_name(name: str, values: Values, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^preprocessor_config.json has {message}"):
        _ = changed(name, values).ours


@pytest.mark.parametrize(
    ("name", "processor", "message"),
    [
        ("idefics3", {"image_seq_len": 64}, r"image_seq_len = 64, but config.json has .* = 9"),
        ("idefics3", {"image_seq_len": "9"}, "image_seq_len = '9'; it must be at least 1"),
        ("gemma3", {"image_seq_length": 64}, "image_seq_length = 64, but config.json has mm_token"),
        ("onevision", {"num_image_tokens": 728}, "num_image_tokens = 728, but"),
        ("onevision", {"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio = 'anyres', but"),
        ("onevision", {"image_token": ""}, "image_token = ''; it must be a token's text"),
        ("llava-next", {"patch_size": 16}, "patch_size = 16, but config.json has patch_size = 14"),
        ("mistral3", {"patch_size": 16}, "patch_size = 16, but"),
        ("mistral3", {"spatial_merge_size": 1}, "spatial_merge_size = 1, but"),
    ],
)
def test_processor_that_disagrees_with_the_model_is_refused_by_name(
    name: str, processor: Values, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^processor_config.json has {message}"):
        _ = changed(name, {}, processor).ours


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("gemma3", {"vision_config": None}, "has no vision_config"),
        ("gemma3", {"mm_tokens_per_image": 0}, "mm_tokens_per_image = 0; it must be at least 1"),
        ("onevision", {"vision_feature_select_strategy": "default"}, "supported .*: 'full'"),
        ("llava-next", {"vision_feature_select_strategy": "full"}, "supported .*: 'default'"),
        ("llava-next", {"image_grid_pinpoints": [[336, 336]]}, "image_grid_pinpoints = "),
        ("idefics3", {"scale_factor": 4}, "scale_factor = 4 must divide 6"),
    ],
)
def test_model_that_the_processors_do_not_fit_is_refused(
    name: str, model: Values, message: str
) -> None:
    case = BY_NAME[name]
    with pytest.raises(ConfigError, match=message):
        _ = dataclasses.replace(case, model={**case.model, **model}).ours


def test_aspect_ratio_without_a_number_is_refused() -> None:
    case = BY_NAME["onevision"]
    ratio = {"vision_aspect_ratio": "anyres"}
    both = dataclasses.replace(
        case, model={**case.model, **ratio}, processor={**case.processor, **ratio}
    )
    with pytest.raises(ConfigError, match="supported: anyres_max_N"):
        _ = both.ours


THIN = ((1, 200), (1, 3000), (3000, 1), (2, 30_000), (30_000, 2), (100_000, 1), (1, 100_000))


@by_case
@pytest.mark.variants(4)
def test_strips_equal_the_reference_or_are_refused(case: Case) -> None:
    """The reference raises a ValueError, or takes gigabytes to pad a strip to a square."""
    for size in THIN:
        pixels, message = None, ""
        try:
            _, pixels = case.process(noise(*size))
        except UnfitPictureError as error:
            message = str(error)
        if pixels is not None:
            with pillow_12_3_order():
                expected = case.expected(case.reference_of(*case.pictures(size), **RAW))
            assert np.array_equal(expected, pixels), size
            continue
        assert f"{size[0]} x {size[1]} pixels" in message
        if max(size) <= 3000:
            with pytest.raises(ValueError, match=r"ratio|height"):
                case.reference_of(*case.pictures(size), **RAW)


def test_picture_that_needs_much_memory_between_the_steps_is_refused() -> None:
    picture: Any = SimpleNamespace(width=1000, height=90_000)
    with pytest.raises(UnfitPictureError, match=r"896 x 90000 pixels, and 1 to 67108864 are"):
        resized(picture, 896, 896, 2)
