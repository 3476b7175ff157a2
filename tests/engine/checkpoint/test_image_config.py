"""The files of image processors, read as transformers' AutoImageProcessor reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from engine.checkpoint.image_config import (
    IMAGE_PROCESSORS,
    ImageConfig,
    image_processor_type,
    missing_tower,
    normalization_of,
    read_image_config,
)
from engine.errors import ConfigError

QWEN = "Qwen2VLForConditionalGeneration"
NESTED, FLAT = "processor_config.json", "preprocessor_config.json"
GEMMA = "Gemma3ImageProcessor"
OTHER = {"image_mean": [0.1, 0.2, 0.3], "rescale_factor": 0.5}


def write(folder: Path, **files: Any) -> Path:
    model = {"model_type": "qwen2_vl", "architectures": [QWEN]}
    for name, content in {"config": model, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor", **OTHER}},
        {"preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessorFast", **OTHER}},
        {"preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessorPil", **OTHER}},
        {"preprocessor_config": OTHER},
        {"processor_config": {"image_processor": OTHER}},
        {"processor_config": {"image_processor": None}, "preprocessor_config": OTHER},
        {"processor_config": {"processor_class": "P"}, "preprocessor_config": OTHER},
        {
            "processor_config": {"image_processor": {"image_processor_type": GEMMA}},
            "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor", **OTHER},
        },
        {"preprocessor_config": {"image_std": 0.25}},
    ],
)
def test_files_are_read_as_transformers_reads_them(tmp_path: Path, files: dict[str, Any]) -> None:
    reference = AutoImageProcessor.from_pretrained(write(tmp_path, **files), backend="pil")
    config = read_image_config(tmp_path)
    assert config is not None
    assert f"{image_processor_type(config, QWEN)}Pil" == type(reference).__name__
    found = normalization_of(config, QWEN)
    std = reference.image_std
    assert found.scale == reference.rescale_factor
    assert found.mean == tuple(reference.image_mean)
    assert found.std == (tuple(std) if isinstance(std, list | tuple) else (std,) * 3)


@pytest.mark.parametrize("architecture", IMAGE_PROCESSORS)
def test_settings_that_are_absent_have_the_values_of_the_class(architecture: str) -> None:
    name = IMAGE_PROCESSORS[architecture]
    config = ImageConfig({"image_processor_type": name}, FLAT, {})
    kind = get_image_processor_class_from_name(f"{name}Pil")()
    found = normalization_of(config, architecture)
    assert found.scale == kind.rescale_factor
    assert found.mean == tuple(kind.image_mean)
    assert found.std == tuple(kind.image_std)


def test_folder_without_the_files_has_no_settings(tmp_path: Path) -> None:
    assert read_image_config(write(tmp_path)) is None
    assert read_image_config(write(tmp_path, processor_config={"image_seq_len": 64})) is None


def test_settings_know_their_file_and_those_of_the_processor_around_them(tmp_path: Path) -> None:
    flat = {"image_processor_type": "Idefics3ImageProcessor"}
    write(tmp_path, processor_config={"image_seq_len": 64}, preprocessor_config=flat)
    config = read_image_config(tmp_path)
    assert config == ImageConfig(flat, FLAT, {"image_seq_len": 64})


@pytest.mark.parametrize("off", [False, None])
def test_steps_that_are_off_leave_values_as_they_are(tmp_path: Path, off: bool | None) -> None:
    """Their own settings may be null then. The reference agrees."""
    steps = {"do_rescale": off, "do_normalize": off, "image_mean": None, "rescale_factor": None}
    write(tmp_path, preprocessor_config=steps)
    picture = Image.new("RGB", (56, 56), (1, 2, 3))
    reference = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert set(reference(picture)["pixel_values"].ravel()) == {1.0, 2.0, 3.0}
    raw = ImageConfig(steps, FLAT, {})
    found = normalization_of(raw, QWEN)
    assert (found.scale, found.mean, found.std) == (1.0, (0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_mean": [0.5, 0.5]}, r"image_mean = \[0.5, 0.5\]; supported: a finite number, or"),
        ({"image_mean": ["a"] * 3}, "image_mean"),
        ({"image_mean": True}, "image_mean"),
        ({"image_mean": None}, "image_mean = None; supported: a finite number"),
        ({"rescale_factor": None}, "rescale_factor = None"),
        ({"image_std": [0.5, 0, 0.5]}, r"image_std = .*; supported: numbers other than 0"),
        ({"rescale_factor": float("nan")}, "rescale_factor = nan; supported: finite numbers"),
        ({"do_rescale": "yes"}, "do_rescale = 'yes'; supported: true and false"),
        ({"image_processor_type": 3}, "image_processor_type = 3; supported: names of classes"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{FLAT} has {message}"):
        normalization_of(ImageConfig(values, FLAT, {}), QWEN)


def test_nested_settings_that_are_no_object_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="image_processor must be an object"):
        read_image_config(write(tmp_path, processor_config={"image_processor": "a"}))


def test_architecture_without_images_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes no images here"):
        normalization_of(ImageConfig({}, FLAT, {}), "LlamaForCausalLM")


def test_missing_tower_is_searched_in_the_index_of_several_files(tmp_path: Path) -> None:
    model: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vision_config": {},
    }
    assert missing_tower(model, tmp_path) is None, "random weights need no files"
    index, text = "model.safetensors.index.json", "model.language_model.norm.weight"
    for tower in ("vision_tower.std_bias", "model.vision_tower.std_bias"):
        names = dict.fromkeys((text, tower), "a.safetensors")
        (tmp_path / index).write_text(json.dumps({"weight_map": names}))
        assert missing_tower(model, tmp_path) is None
    (tmp_path / index).write_text(json.dumps({"weight_map": {text: "a.safetensors"}}))
    assert missing_tower(model, tmp_path) == f"{index} has no tensors of vision_tower"
    assert missing_tower(model | {"architectures": [QWEN]}, tmp_path) is None
