"""Idefics3 and SmolVLM against transformers: as text models, and with images in their prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.idefics3 import TEXT_DEFAULTS, Idefics3
from engine.protocol.images import Image, ImagePlace
from tests.support.forward import chunked, forward
from tests.support.forward import whole as at_once
from tests.support.golden import TOLERANCE, Case, Equality, Golden, golden_tests, load
from tests.support.vision import IMAGE_PROCESSOR, numbers_of, picture, shows, whole

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


def prompt_with(tiles: list[int]) -> tuple[list[int], list[int]]:
    """Return a prompt with one image for each number of tiles, and the first token of each."""
    prompt, starts = [5, 6, 7], []
    for number, count in enumerate(tiles):
        starts.append(len(prompt))
        prompt += [IMAGE_TOKEN] * (count * PER_TILE) + [20 + number, 9]
    return [*prompt, *range(30, 41)], starts


def image_of(tiles: int, first: int) -> Image:
    place = ImagePlace(bytes(16), ((first, tiles * PER_TILE),))
    return Image(place, b"", (tiles, EDGE, EDGE))


@pytest.mark.parametrize("golden", CASES, indirect=True, ids=lambda case: case.name)
def test_idefics3_with_images_matches_transformers(golden: Golden) -> None:
    """Prompts with none, one and three images, each at once and in chunks that cut images."""
    (golden.folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    runner = load(golden.folder)
    model = runner.model
    assert isinstance(model, Idefics3)
    prompts, shown, expected = [], [], []
    for seed, tiles in enumerate([[], [1], [5, 1, 2]]):
        pixels = [picture((count, EDGE, EDGE), seed) for count in tiles]
        prompt, starts = prompt_with(tiles)
        with torch.inference_mode():
            encoded = [
                whole(model.encode_image(each, image_of(len(each), first)))
                for each, first in zip(pixels, starts, strict=True)
            ]
            assert all(model.image_bytes * len(each) == each.nbytes for each in encoded)
            values = {"pixel_values": numbers_of(torch.cat(pixels))[None]} if tiles else {}
            expected.append(golden.reference(torch.tensor([prompt]), **values).logits[0])
        prompts.append(prompt)
        shown.append(list(zip(starts, encoded, strict=True)))
    for plan in (at_once(prompts), chunked(prompts, 7)):
        found = forward(runner, prompts, plan, prepare=shows(shown))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)
    (blind,) = forward(runner, prompts[1:2], at_once(prompts[1:2]))
    assert (blind - expected[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"text_config": {"model_type": "mistral"}}, "model_type"),
        ({"text_config": 5}, "text_config = 5"),
        ({"scale_factor": 4}, "scale_factor 4"),
        ({"image_processor": {"image_std": [0, 1, 1]}}, "image_std"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_idefics3_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Idefics3.read_config(config().to_dict() | wrong)


def test_text_defaults_are_those_of_transformers() -> None:
    """A published checkpoint's nested config omits values that equal the defaults."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.LlamaConfig().to_dict()
    assert {key: defaults[key] for key in TEXT_DEFAULTS} == TEXT_DEFAULTS
