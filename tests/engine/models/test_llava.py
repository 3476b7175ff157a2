"""LLaVA-NeXT and LLaVA-OneVision against transformers: with and without images in their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.llava import TEXT_DEFAULTS, LlavaNext, LlavaOnevision
from tests.support.golden import (
    FEW,
    Case,
    Equality,
    Golden,
    Tensors,
    accounts_for_tensors,
    golden_tests,
    refusal,
)
from tests.support.seeing import Shown, check_images
from tests.support.vision import numbers_of, picture

pytestmark = pytest.mark.usefixtures("one_thread")
EDGE, PER_TILE = 28, 16  # pixels along a tile's side, and its embeddings
IMAGE_TOKEN = 210
PINPOINTS = [[EDGE * h, EDGE * w] for h in (1, 2, 3) for w in (1, 2, 3)]
TEXT = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": EDGE,
    "patch_size": 7,
}


def config(kind: str = "LlavaOnevision", text: str = "qwen2", **overrides: Any) -> Any:
    import transformers

    tower = "clip_vision_model" if kind == "LlavaNext" else "siglip_vision_model"
    tied = overrides.get("tie_word_embeddings", False)
    values: dict[str, Any] = {
        "text_config": TEXT | {"model_type": text, "tie_word_embeddings": tied},
        "vision_config": VISION | {"model_type": tower},
        "image_grid_pinpoints": PINPOINTS,
        "image_token_index": IMAGE_TOKEN,
    }
    return getattr(transformers, f"{kind}Config")(**(values | overrides))


def published(config: dict[str, Any], tensors: Tensors) -> None:
    """Rename the tensors of the tower as published checkpoints do, with their buffer."""
    for name in [name for name in tensors if name.startswith("vision_tower.")]:
        inner = name.removeprefix("vision_tower.")
        tensors[f"vision_tower.vision_model.{inner}"] = tensors.pop(name)
    tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]


def in_memory(config: dict[str, Any], tensors: Tensors) -> None:
    """Rename all tensors as transformers does when it loads a checkpoint."""
    for name in list(tensors):
        renamed = name.replace("language_model.model.", "model.language_model.")
        renamed = renamed.replace("language_model.lm_head.", "lm_head.")
        if renamed == name:
            renamed = f"model.{name}"
        tensors[renamed] = tensors.pop(name)


CASES = [
    Case("next", lambda: config("LlavaNext", "mistral"), edit=in_memory),
    Case("next-old", lambda: config("LlavaNext", "llama"), edit=published),
    Case("onevision-tied", lambda: config(tie_word_embeddings=True), edit=published),
    Case("onevision", config),
]


# Not all tensors of these checkpoints are needed; `test_llava_names_missing_and_extra_tensors`.
@golden_tests(CASES, [each for each in FEW if each is not accounts_for_tensors])
def test_llava_without_images_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", CASES[-1:], indirect=True, ids=lambda case: case.name)
def test_llava_names_missing_and_extra_tensors(golden: Golden) -> None:
    for name in (
        "image_newline",
        "multi_modal_projector.linear_2.bias",
        "vision_tower.embeddings.position_embedding.weight",
        "vision_tower.encoder.layers.1.self_attn.k_proj.weight",
        "language_model.model.layers.1.self_attn.k_proj.weight",
        "language_model.lm_head.weight",
    ):
        assert name in refusal(golden, lambda config, tensors, name=name: tensors.pop(name))
    surplus = {"vision_tower.surplus.weight": torch.ones(1)}
    message = refusal(golden, lambda config, tensors: tensors.update(surplus))
    assert "vision_tower.surplus.weight" in message


def tiled(rows: int, columns: int, size: tuple[int, int], tokens: int) -> Shown:
    """Return a picture of `size` that is cut into tiles behind its overview."""
    pixels = picture((1 + rows * columns, EDGE, EDGE), rows)
    return Shown(pixels, PER_TILE + tokens, (rows, columns), size)


def rows_of(size: tuple[int, int], height: int, width: int) -> int:
    """Return the rows of a grid of embeddings that a picture wider than the grid leaves."""
    shown = round(size[0] * width / size[1], 7)
    return height - 2 * ((height - int(shown)) // 2)


# 56 x 84 pixels are 8 x 12 embeddings: all rows of a picture of the same form remain, and 6 of one
# that is lower. Each row has a new line.
WHOLE = tiled(2, 3, (56, 84), 8 * 13)
LOW = tiled(2, 3, (40, 82), rows_of((40, 82), 8, 12) * 13)
SMALL = tiled(1, 1, (28, 28), 4 * 5)


def one_tile(seed: int) -> Shown:
    return Shown(picture((1, EDGE, EDGE), seed), PER_TILE + 1, size=(30, 20))


def padded_inputs(images: Sequence[Shown]) -> dict[str, Any]:
    """Return the reference's arguments for LLaVA-NeXT: as many tiles for each picture."""
    tiles = max(len(each.pixels) for each in images)
    padded = torch.zeros(len(images), tiles, 3, EDGE, EDGE)
    for number, each in enumerate(images):
        padded[number, : len(each.pixels)] = numbers_of(each.pixels)
    return {"pixel_values": padded, "image_sizes": torch.tensor([each.size for each in images])}


def onevision_inputs(images: Sequence[Shown]) -> dict[str, Any]:
    return padded_inputs(images) | {"batch_num_images": torch.tensor([len(images)])}


@pytest.mark.parametrize("golden", CASES, indirect=True, ids=lambda case: case.name)
def test_llava_with_images_matches_transformers(golden: Golden) -> None:
    """A lone picture is tiled; with others, each is one tile in LLaVA-OneVision."""
    is_next = "next" in golden.case.name
    several = [WHOLE, LOW, SMALL]
    if not is_next:
        several = [one_tile(1), one_tile(2), one_tile(3)]
    inputs = padded_inputs if is_next else onevision_inputs
    check_images(golden, [[], [WHOLE], [LOW], several], IMAGE_TOKEN, inputs)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"text_config": {"model_type": "gemma"}}, "model_type"),
        ({"text_config": None}, "text_config"),
        ({"vision_feature_layer": -9}, "vision_feature_layer"),
        ({"image_processor": {"image_mean": "x"}}, "image_mean"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_llava_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    for model, values in ((LlavaOnevision, config()), (LlavaNext, config("LlavaNext", "llama"))):
        with pytest.raises(ConfigError, match=said):
            model.read_config(values.to_dict() | wrong)


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_text_defaults_are_those_of_transformers(kind: str) -> None:
    """A published checkpoint's nested config omits values that equal the defaults."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.AutoConfig.for_model(kind).to_dict()
    expected = TEXT_DEFAULTS[kind]
    assert {key: defaults[key] for key in expected} == expected
    if "num_key_value_heads" not in expected:
        assert defaults["num_key_value_heads"] == expected["num_attention_heads"]
