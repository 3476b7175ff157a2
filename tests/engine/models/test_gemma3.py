"""Gemma 3 against transformers: two rotary bases, and images whose tokens see each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.checkpoint.image_config import missing_tower
from engine.errors import ConfigError
from engine.models.gemma3 import TEXT_DEFAULTS, THETA, Gemma3
from engine.models.multimodal import other_spellings
from tests.support.golden import (
    EQUALITIES,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    greedy,
    refusal,
    unnormalised,
    window_is_exact,
)
from tests.support.seeing import Shown, check_images, prompt_with
from tests.support.vision import numbers_of, picture

pytestmark = pytest.mark.usefixtures("one_thread")
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 10,
    "sliding_window_pattern": 3,
    "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
}


def config(**overrides: Any) -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**(SMALL | overrides))


def multimodal(tied: bool) -> Any:
    from transformers import Gemma3Config

    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 8,
        "patch_size": 4,
    }
    text = SMALL | {"tie_word_embeddings": tied}
    return Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, tie_word_embeddings=tied
    )


def old_spelling(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form that transformers 4.50 wrote."""
    del config["layer_types"]
    parameters = config.pop("rope_parameters")
    config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    config["rope_scaling"] = parameters["full_attention"]
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")


def old_multimodal(config: dict[str, Any], tensors: Tensors) -> None:
    old_spelling(config["text_config"], tensors)
    for part in ("language_model.model.", "language_model.", "vision_tower.", "multi_modal_proj"):
        assert any(name.startswith(part) for name in tensors), part


def new_multimodal(config: dict[str, Any], tensors: Tensors) -> None:
    """Rename tensors to the prefixes that transformers has used in memory since 4.52."""
    for name in list(tensors):
        renamed = name.replace("language_model.model.", "model.language_model.")
        renamed = renamed.replace("language_model.lm_head.", "lm_head.")
        if renamed == name:
            renamed = f"model.{name}"
        tensors[renamed] = tensors.pop(name)


def copied_head(config: dict[str, Any], tensors: Tensors) -> None:
    name = "language_model.model.embed_tokens.weight"
    tensors["language_model.lm_head.weight"] = tensors[name].clone()


CASE = Case(
    "all",
    lambda: config(tie_word_embeddings=False),
    without={
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL},
    },
    zeroed=[
        "q_norm",
        "k_norm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        "lm_head",
    ],
    replaced={
        "engine.layers.norm.OffsetRMSNorm.offset": False,
        "engine.layers.attention.RotaryAttention.forward": unnormalised,
    },
    lengths=WINDOW_LENGTHS,
)
SPELLINGS = [
    Case(
        "old",  # with the default pattern, in which the sixth layer is global
        lambda: config(num_hidden_layers=7, sliding_window_pattern=6),
        edit=old_spelling,
        without={"rope_local_base_freq": 100.0, "rope_scaling": None, "rope_theta": 500.0},
    ),
    Case(
        "capped",
        lambda: config(final_logit_softcapping=0.5),
        without={"final_logit_softcapping": None},
    ),
]
MULTIMODAL = [
    Case("old-multimodal", lambda: multimodal(tied=False), edit=old_multimodal),
    Case("new-multimodal", lambda: multimodal(tied=False), edit=new_multimodal),
]


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_gemma3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_gemma3_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def accounts_for_both_halves(golden: Golden) -> None:
    """Every tensor of both halves is required, and further tensors are refused."""
    for missing in (
        "language_model.model.layers.3.mlp.up_proj.weight",
        "multi_modal_projector.mm_input_projection_weight",
        "vision_tower.embeddings.position_embedding.weight",
    ):

        def remove(config: dict[str, Any], tensors: Tensors, missing: str = missing) -> None:
            for name in {missing, *other_spellings(missing)} & tensors.keys():
                del tensors[name]

        assert missing in refusal(golden, remove)
    for surplus in ("audio_tower.weight", "language_model.vision_tower.weight"):
        extra = {surplus: torch.ones(1)}
        assert surplus in refusal(golden, lambda config, tensors, e=extra: tensors.update(e))


@golden_tests(
    [Case("tied-multimodal", lambda: multimodal(tied=True), edit=copied_head)], [full_prefill]
)
def test_gemma3_tied_multimodal_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(MULTIMODAL, [full_prefill, greedy, accounts_for_both_halves])
def test_gemma3_multimodal_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def blind(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove the tensors of the tower."""
    for name in [name for name in tensors if not name.startswith("language_model.")]:
        del tensors[name]


def takes_text_only(golden: Golden) -> None:
    """A folder without any tensor of the tower has no SeeingGemma3; the server says what lacks."""
    assert type(golden.runner.model) is Gemma3
    config = json.loads((golden.folder / "config.json").read_text())
    found = missing_tower(config, golden.folder)
    assert found == "model.safetensors has no tensors of vision_tower"


@golden_tests(
    [Case("blind", lambda: multimodal(tied=False), edit=blind)],
    [full_prefill, takes_text_only],
)
def test_gemma3_without_a_tower_is_a_text_model(golden: Golden, equality: Equality) -> None:
    equality(golden)


IMAGE_TOKEN, EDGE, PER_IMAGE = 210, 24, 9
SEEING = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": EDGE,
    "patch_size": 4,
    "vision_use_head": False,
}


def seeing(**overrides: Any) -> Any:
    from transformers import Gemma3Config

    return Gemma3Config(
        text_config=SMALL | overrides,
        vision_config=SEEING,
        mm_tokens_per_image=PER_IMAGE,
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=overrides.get("tie_word_embeddings", True),
    )


def published(config: dict[str, Any], tensors: Tensors) -> None:
    """Rename the tensors of the tower as published checkpoints do."""
    for name in [name for name in tensors if name.startswith("vision_tower.")]:
        inner = name.removeprefix("vision_tower.").removeprefix("vision_model.")
        tensors[f"vision_tower.vision_model.{inner}"] = tensors.pop(name)


# An image is longer than the window, or shorter.
SEES = [
    Case("short-window", lambda: seeing(sliding_window=5), edit=published),
    Case("long-window", lambda: seeing(sliding_window=14), edit=new_multimodal),
]


def square(seed: int) -> Shown:
    return Shown(picture((1, EDGE, EDGE), seed), PER_IMAGE)


def pixel_values(images: Sequence[Shown]) -> dict[str, Any]:
    return {"pixel_values": numbers_of(torch.cat([each.pixels for each in images]))}


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("golden", SEES, indirect=True, ids=lambda case: case.name)
def test_gemma3_with_images_matches_transformers(golden: Golden, backend: str) -> None:
    def inputs(images: Sequence[Shown]) -> dict[str, Any]:
        prompt, _ = prompt_with(images, IMAGE_TOKEN)
        types = torch.tensor([prompt]) == IMAGE_TOKEN
        return pixel_values(images) | {"token_type_ids": types.long()}

    one, *three = [square(seed) for seed in range(4)]
    check_images(golden, [[], [one], three], IMAGE_TOKEN, inputs, attention_backend=backend)


def test_gemma3_text_config_ignores_no_vision_tensors() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = Gemma3(config().to_dict(), max_positions=128, dtype=torch.float32)
    assert not model.weight_map().ignored_prefixes


def test_gemma3_sparse_text_config_gets_transformers_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    defaults = transformers.Gemma3TextConfig()
    assert {key: getattr(defaults, key) for key in TEXT_DEFAULTS} == TEXT_DEFAULTS
    bases = {kind: p["rope_theta"] for kind, p in defaults.rope_parameters.items()}
    assert bases == {kind: base for kind, (_, base) in THETA.items()}
    sparse = {  # google/gemma-3-4b-it
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    tower = {"hidden_size": 1152, "image_size": 896, "num_hidden_layers": 27, "patch_size": 14}
    vision = tower | {"intermediate_size": 4304, "num_attention_heads": 16}
    whole = transformers.Gemma3Config(text_config=sparse, vision_config=vision).to_dict()
    found = Gemma3.read_config({"text_config": sparse, "vision_config": vision})
    assert found == Gemma3.read_config(whole)
    assert found.max_positions == 131072
    assert (found.rope_theta, found.rope_scaling.factor, found.local_theta) == (1e6, 8.0, 1e4)
    assert [i for i, window in enumerate(found.windows) if window is None] == [5, 11, 17, 23, 29]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings = None"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": LOCAL}, "full_attention and sliding_attention each"),
        ({"rope_parameters": [LOCAL]}, "full_attention and sliding_attention each"),
        ({"rope_scaling": GLOBAL}, "rope_scaling"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "truncate": False}}},
            "truncate = False",
        ),
        ({"rope_parameters": None, "rope_scaling": [8.0]}, "must be an object"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ({"text_config": 3}, "text_config = 3"),
        ({"text_config": {"tie_word_embeddings": False}}, "tie_word_embeddings = False"),
    ],
    ids=str,
)
def test_gemma3_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Gemma3.read_config(config().to_dict() | wrong)
