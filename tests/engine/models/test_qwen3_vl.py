"""Qwen3-VL against transformers: as a text model, and with images in its prompts."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.qwen3_vl import ROPE_THETA, TEXT_DEFAULTS, Qwen3VL
from tests.support.golden import Case, Equality, Golden, golden_tests
from tests.support.qwen_images import PATCH, shown, vision_inputs
from tests.support.seeing import check_images

pytestmark = pytest.mark.usefixtures("one_thread")
IMAGE_TOKEN = 210
TEXT = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": PATCH,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 1],
}


def config(tied: bool = False, **overrides: Any) -> Any:
    from transformers import Qwen3VLConfig

    values: dict[str, Any] = {
        "text_config": TEXT,
        "vision_config": VISION,
        "image_token_id": IMAGE_TOKEN,
        "vision_start_token_id": 207,
        "vision_end_token_id": 208,
        "video_token_id": 209,
        "tie_word_embeddings": tied,
    }
    return Qwen3VLConfig(**(values | overrides))


CASES = [Case("tied", lambda: config(tied=True)), Case("apart", config)]


@golden_tests(CASES)
def test_qwen3_vl_without_images_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", CASES, indirect=True, ids=lambda case: case.name)
def test_qwen3_vl_with_images_matches_transformers(golden: Golden) -> None:
    stories = [[], [shown(3, 5, 0)], [shown(4, 2, 1), shown(1, 1, 2), shown(2, 9, 3)]]
    check_images(golden, stories, IMAGE_TOKEN, vision_inputs, types=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mrope_section": [2, 3, 3]}, "do not fit"),
        ({"mrope_section": [4, 3, 2]}, "9 frequencies; the heads have 8"),
        ({"mrope_section": 5}, "three counts"),
    ],
    ids=str,
)
def test_qwen3_vl_unsupported_sections_raise_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    values = config().to_dict()
    values["text_config"]["rope_parameters"] |= wrong
    with pytest.raises(ConfigError, match=said):
        Qwen3VL.read_config(values)


def test_qwen3_vl_tower_of_another_width_raises_config_error() -> None:
    pytest.importorskip("transformers")
    values = config().to_dict()
    values["vision_config"]["out_hidden_size"] = 64
    with pytest.raises(ConfigError, match="out_hidden_size 64"):
        Qwen3VL.read_config(values)


def test_text_defaults_are_those_of_transformers() -> None:
    """A checkpoint's nested config may omit values that equal the defaults."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.AutoConfig.for_model("qwen3_vl_text")
    assert {key: getattr(defaults, key) for key in TEXT_DEFAULTS} == TEXT_DEFAULTS
    assert defaults.rope_parameters["rope_theta"] == ROPE_THETA
