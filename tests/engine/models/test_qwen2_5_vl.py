"""Qwen2.5-VL against transformers: as a text model, and with images in its prompts."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.qwen2_5_vl import ROPE_THETA, TEXT_DEFAULTS, Qwen25VL
from tests.support.golden import Case, Equality, Golden, Tensors, golden_tests
from tests.support.qwen_images import PATCH, shown, vision_inputs
from tests.support.seeing import check_images

pytestmark = pytest.mark.usefixtures("one_thread")
IMAGE_TOKEN = 210
TEXT = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [3, 1, 4]},
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": PATCH,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1],
}


def config(tied: bool = False) -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=207,
        vision_end_token_id=208,
        video_token_id=209,
        tie_word_embeddings=tied,
    )


def published(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the language model's settings at the top, as published checkpoints do."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    assert config["model_type"] == "qwen2_5_vl"
    config |= {key: value for key, value in text.items() if key not in config}


def in_memory(config: dict[str, Any], tensors: Tensors) -> None:
    """Rename all tensors as transformers does when it loads a checkpoint."""
    for name in [name for name in tensors if name != "lm_head.weight"]:
        tower = name.startswith("visual.")
        renamed = name if tower else "language_model." + name.removeprefix("model.")
        tensors[f"model.{renamed}"] = tensors.pop(name)


CASES = [
    Case("published-tied", lambda: config(tied=True), edit=published),
    Case("apart", config),
]


@golden_tests(CASES)
def test_qwen2_5_vl_without_images_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


RENAMED = Case("in-memory", config, edit=in_memory)


@pytest.mark.parametrize("golden", [*CASES, RENAMED], indirect=True, ids=lambda case: case.name)
def test_qwen2_5_vl_with_images_matches_transformers(golden: Golden) -> None:
    stories = [[], [shown(3, 5, 0)], [shown(4, 2, 1), shown(1, 1, 2), shown(2, 9, 3)]]
    check_images(golden, stories, IMAGE_TOKEN, vision_inputs, types=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mrope_section": [2, 2]}, "three counts"),
        ({"mrope_section": [2, 2, -1]}, "three counts"),
        ({"mrope_section": [2, 2, 3]}, "7 frequencies; the heads have 8"),
        ({"rope_type": "other"}, "'other' is not supported"),
    ],
    ids=str,
)
def test_qwen2_5_vl_unsupported_rope_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    values = config().to_dict()
    values["text_config"]["rope_parameters"] |= wrong
    with pytest.raises(ConfigError, match=said):
        Qwen25VL.read_config(values)


def test_qwen2_5_vl_tower_of_another_width_raises_config_error() -> None:
    pytest.importorskip("transformers")
    values = config().to_dict()
    values["vision_config"]["out_hidden_size"] = 48
    with pytest.raises(ConfigError, match="out_hidden_size 48"):
        Qwen25VL.read_config(values)


def test_text_defaults_are_those_of_transformers() -> None:
    """A checkpoint's config omits values that equal the defaults."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.AutoConfig.for_model("qwen2_5_vl_text")
    found = {key: getattr(defaults, key) for key in TEXT_DEFAULTS if key != "sliding_window"}
    assert found == {key: TEXT_DEFAULTS[key] for key in found}
    assert defaults.rope_parameters["rope_theta"] == ROPE_THETA
