"""Qwen3.5 against transformers: the same delta nets as Qwen3-Next, and multimodal checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.image_config import missing_tower
from engine.errors import ConfigError
from engine.layers.rotary_sections import RotarySections
from engine.models.qwen3_5 import Qwen35, SeeingQwen35
from tests.engine.models.test_qwen3_next import ROTATED, of_own_input, ungated
from tests.support.delta_rule import without
from tests.support.forward import forward, whole
from tests.support.golden import (
    TOLERANCE,
    Case,
    Equality,
    Golden,
    Tensors,
    accounts_for_tensors,
    edit_checkpoint,
    full_prefill,
    golden_tests,
    load,
    randomise,
    unnormalised,
)
from tests.support.qwen_images import PATCH, shown, vision_inputs
from tests.support.seeing import check_images
from tests.support.single_steps import in_single_steps, single_steps

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-2,  # see test_qwen3_next.py
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
IMAGE_TOKEN = 210
SEEING_VISION = VISION | {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "patch_size": PATCH,
    "num_position_embeddings": 49,
}


def config(**overrides: Any) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**(SMALL | overrides))


def seeing_fields(**text: Any) -> dict[str, Any]:
    """Return the fields of a config with a tower. Of 16 dimensions of a head, 12 are rotated."""
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
    return {
        "text_config": SMALL | {"rope_parameters": rope | {"mrope_section": [2, 2, 2]}} | text,
        "vision_config": SEEING_VISION,
        "image_token_id": IMAGE_TOKEN,
        "vision_start_token_id": 207,
        "vision_end_token_id": 208,
        "video_token_id": 209,
    }


def seeing(**text: Any) -> Any:
    from transformers import Qwen3_5Config

    return Qwen3_5Config(**seeing_fields(**text))


DELTA = "engine.layers.gated_delta_net."
CASE = Case(
    "delta",
    config,
    without={"rope_parameters": ROTATED},
    zeroed=["A_log", "dt_bias", "conv1d", "linear_attn.norm", "q_norm"],
    replaced={
        f"{DELTA}CausalConv.forward": of_own_input,
        f"{DELTA}gated_delta": without("decays"),
        "engine.layers.norm.gated_rms_norm": ungated,
        "engine.layers.attention.sigmoid_mul": ungated,
        "engine.layers.attention.RotaryAttention.forward": unnormalised,
    },
    reference=single_steps,
)


def inside(config: dict[str, Any], tensors: Tensors) -> None:
    """Put a language model into a multimodal one, as in Qwen's checkpoints."""
    text = {key: config.pop(key) for key in list(config) if key != "architectures"}
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    config |= {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": VISION,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    for name in list(tensors):
        if name.startswith("model."):
            tensors["model.language_model" + name.removeprefix("model")] = tensors.pop(name)
    tensors["mtp.fc.weight"] = torch.ones(2)
    tensors |= tower_tensors()


def tower_tensors() -> Tensors:
    """Return the tensors of the tower of VISION."""
    from transformers import Qwen3_5VisionConfig, Qwen3_5VisionModel

    tower = Qwen3_5VisionModel(Qwen3_5VisionConfig(**VISION))
    return {f"model.visual.{name}": each for name, each in tower.state_dict().items()}


def named_as_text(config: dict[str, Any], tensors: Tensors) -> None:
    """Name the language model in a checkpoint that has a tower, too."""
    inside(config, tensors)
    config["architectures"] = ["Qwen3_5ForCausalLM"]


def tied_at_the_top(config: dict[str, Any], tensors: Tensors) -> None:
    inside(config, tensors)
    assert not any("lm_head" in name for name in tensors)
    config["text_config"]["tie_word_embeddings"] = False


def tied_in_the_text(config: dict[str, Any], tensors: Tensors) -> None:
    inside(config, tensors)
    del config["tie_word_embeddings"]


def with_old_prefix(config: dict[str, Any], tensors: Tensors) -> None:
    """Keep the prefix of the multimodal checkpoint that the language model was read from."""
    for name in list(tensors):
        if name.startswith("model."):
            tensors["model.language_model" + name.removeprefix("model")] = tensors.pop(name)


def tied() -> Any:
    return config(tie_word_embeddings=True)


def yarn() -> Any:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    return config(rope_parameters=rope | {"rope_theta": 1e4, "partial_rotary_factor": 0.5})


SPELLINGS = [
    Case("inside", config, inside, reference=single_steps),
    Case("named-as-text", config, named_as_text, reference=single_steps),
    Case("tied-at-the-top", tied, tied_at_the_top, reference=single_steps),
    Case("tied-in-the-text", tied, tied_in_the_text, reference=single_steps),
    Case("old-prefix", config, with_old_prefix, reference=single_steps),
    Case("yarn", yarn, reference=single_steps),
]


@golden_tests([CASE], quick=[full_prefill, accounts_for_tensors])
def test_qwen3_5_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_qwen3_5_spellings_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("kind", ["whole", "language-model"])
def test_multimodal_model_saved_by_transformers_is_served(kind: str, tmp_path: Path) -> None:
    """Its language model saved again is called Qwen3_5ForCausalLM, but has the same prefix."""
    transformers = pytest.importorskip("transformers")
    rope = ROTATED | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    text = SMALL | {"rope_parameters": rope}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    randomise(model, SMALL["hidden_size"])
    model.save_pretrained(tmp_path / "whole")
    language = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    language.save_pretrained(tmp_path / "language-model")
    prompt = [(3 * index + 1) % 211 for index in range(40)]
    with torch.inference_mode():
        expected = in_single_steps(language)(input_ids=torch.tensor([prompt])).logits[0]
    (found,) = forward(load(tmp_path / kind), [prompt], whole([prompt]))
    torch.testing.assert_close(found, expected, **TOLERANCE)


# ---- images ----------------------------------------------------------------------------------


def blind(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove the tensors of the tower."""
    for name in [name for name in tensors if "visual" in name]:
        del tensors[name]


BLIND = Case("blind", seeing, reference=single_steps, edit=blind, lengths=(33,))


@pytest.mark.parametrize("golden", [BLIND], indirect=True, ids=lambda case: case.name)
def test_qwen3_5_without_a_tower_is_a_text_model(golden: Golden) -> None:
    full_prefill(golden)
    assert not isinstance(golden.runner.model, SeeingQwen35)
    model = json.loads((golden.folder / "config.json").read_text())
    assert missing_tower(model, golden.folder) == "model.safetensors has no tensors of visual"


SEEING = Case("seeing", seeing, reference=single_steps)


@pytest.mark.parametrize("golden", [SEEING], indirect=True, ids=lambda case: case.name)
def test_qwen3_5_with_images_matches_transformers(golden: Golden) -> None:
    stories = [[], [shown(3, 5, 0)], [shown(4, 2, 1), shown(1, 1, 2), shown(2, 9, 3)]]
    check_images(golden, stories, IMAGE_TOKEN, vision_inputs, types=True)


@golden_tests([SEEING], [accounts_for_tensors], quick=[])
def test_qwen3_5_tower_accounts_for_tensors(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: values.pop("vision_config"), "lacks 'vision_config'"),
        (lambda values: values["vision_config"].update(out_hidden_size=64), "out_hidden_size 64"),
        (
            lambda values: values["text_config"]["rope_parameters"].pop("mrope_section"),
            "32 frequencies; the heads have 6",
        ),
    ],
    ids=["tower", "width", "sections"],
)
def test_qwen3_5_unsupported_tower_raises_config_error(
    change: Callable[[dict[str, Any]], object], said: str
) -> None:
    pytest.importorskip("transformers")
    values = seeing().to_dict()
    change(values)
    with pytest.raises(ConfigError, match=said):
        SeeingQwen35.read_config(values)


def test_defaults_are_those_of_transformers() -> None:
    """They are the sizes of Qwen3.5-9B."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5Config(vision_config={"out_hidden_size": 4096})
    read = SeeingQwen35.read_config(config.to_dict())
    assert read.sections == RotarySections((11, 11, 10), interleaved=True)
    assert read.rope_scaling.width(read.head_dim) == 2 * sum(read.sections.counts)
    assert read.vision.deep_layers == ()


# ---- mistakes --------------------------------------------------------------------------------


def test_head_that_differs_from_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    single_steps(config(), tmp_path)
    edit_checkpoint(tmp_path, lambda config, tensors: config.update(tie_word_embeddings=True))
    with pytest.raises(ConfigError, match="lm_head"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"text_config": 3}, "text_config = 3"),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act = 'gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"partial_rotary_factor": 2.0, "rope_parameters": None}, "partial_rotary_factor = 2"),
    ],
    ids=str,
)
def test_qwen3_5_unsupported_config_raises_config_error(
    wrong: dict[str, Any], message: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=message):
        Qwen35.read_config(config().to_dict() | wrong)
