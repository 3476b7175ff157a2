"""Idefics3 and SmolVLM against transformers: as text models, and with images in their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.idefics3 import Idefics3
from tests.support.golden import Case, Equality, Golden, golden_tests
from tests.support.seeing import Shown, check_images
from tests.support.vision import numbers_of, picture

pytestmark = pytest.mark.usefixtures("one_thread")
EDGE, PER_TILE = 24, 9  # pixels along a tile's side, and its embeddings
IMAGE_TOKEN = 210
TEXT = {
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": EDGE,
    "patch_size": 4,
}


def config(kind: str = "Idefics3", **overrides: Any) -> Any:
    import transformers

    values: dict[str, Any] = {
        "text_config": TEXT | {"tie_word_embeddings": overrides.get("tie_word_embeddings", False)},
        "vision_config": VISION,
        "scale_factor": 2,
        "image_token_id": IMAGE_TOKEN,
    }
    return getattr(transformers, f"{kind}Config")(**(values | overrides))


CASES = [
    Case("tied", lambda: config("SmolVLM", tie_word_embeddings=True)),
    Case("apart", config),
]


@golden_tests(CASES)
def test_idefics3_without_images_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def shown(tiles: int, seed: int) -> Shown:
    return Shown(picture((tiles, EDGE, EDGE), seed), tiles * PER_TILE)


def inputs(images: Sequence[Shown]) -> dict[str, Any]:
    return {"pixel_values": numbers_of(torch.cat([each.pixels for each in images]))[None]}


@pytest.mark.parametrize("golden", CASES, indirect=True, ids=lambda case: case.name)
def test_idefics3_with_images_matches_transformers(golden: Golden) -> None:
    three = [shown(5, 1), shown(1, 2), shown(2, 3)]
    check_images(golden, [[], [shown(1, 0)], three], IMAGE_TOKEN, inputs)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"text_config": {"model_type": "mistral"}}, "model_type"),
        ({"text_config": 5}, "text_config = 5"),
        ({"vision_config": 5}, "vision_config = 5"),
        ({"scale_factor": 4}, "scale_factor 4"),
        ({"image_processor": {"image_std": [0, 1, 1]}}, "image_std"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_idefics3_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Idefics3.read_config(config().to_dict() | wrong)
