"""The config of a tower is read with transformers' defaults, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.vision.gemma3 import Gemma3VisionConfig
from engine.models.vision.gemma4 import DEFAULTS, THETA, Gemma4VisionConfig
from engine.models.vision.idefics3 import Idefics3VisionConfig
from engine.models.vision.llava import LlavaVisionConfig
from engine.models.vision.qwen2_5 import Qwen25VisionConfig
from engine.models.vision.qwen3 import Qwen3VisionConfig
from engine.models.vision.qwen_grid import QwenTowerConfig
from engine.models.vision.siglip import SiglipConfig

HIDDEN = 24
Read = Callable[[dict[str, Any]], Any]


def idefics3(config: dict[str, Any]) -> Idefics3VisionConfig:
    return Idefics3VisionConfig.from_hf(config, HIDDEN)


def gemma3(config: dict[str, Any]) -> Gemma3VisionConfig:
    return Gemma3VisionConfig.from_hf(config, HIDDEN)


def gemma4(config: dict[str, Any]) -> Gemma4VisionConfig:
    return Gemma4VisionConfig.from_hf({"vision_config": {}} | config, HIDDEN)


def llava_next(config: dict[str, Any]) -> LlavaVisionConfig:
    vision = {"image_size": 336, "patch_size": 14} | config.get("vision_config", {})
    return LlavaVisionConfig.of_next(config | {"vision_config": vision}, HIDDEN)


def onevision(config: dict[str, Any]) -> LlavaVisionConfig:
    vision = {"image_size": 384, "patch_size": 14} | config.get("vision_config", {})
    return LlavaVisionConfig.of_onevision(config | {"vision_config": vision}, HIDDEN)


def test_an_empty_config_has_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    empty = transformers.Idefics3Config()
    check_siglip(idefics3({"scale_factor": 1}).tower, empty.vision_config)
    check_siglip(gemma3({"mm_tokens_per_image": 49}).tower, transformers.SiglipVisionConfig())
    clip = transformers.CLIPVisionConfig(image_size=336, patch_size=14)
    check_siglip(llava_next({}).tower, clip)
    siglip = transformers.SiglipVisionConfig(image_size=384, patch_size=14)
    check_siglip(onevision({}).tower, siglip)
    qwen = transformers.Qwen2_5_VLConfig().vision_config
    found = Qwen25VisionConfig.read({})
    check_qwen(found, qwen)
    assert found.full_layers == set(qwen.fullatt_block_indexes)
    assert found.window == qwen.window_size // qwen.patch_size // qwen.spatial_merge_size
    qwen = transformers.Qwen3VLConfig().vision_config
    check_qwen(Qwen3VisionConfig.read({}), qwen)
    assert Qwen3VisionConfig.read({}).deep_layers == tuple(qwen.deepstack_visual_indexes)
    gemma = transformers.Gemma4VisionConfig()
    assert {name: getattr(gemma, name) for name in DEFAULTS} == DEFAULTS
    assert gemma.rope_parameters == {"rope_type": "axial", "rope_theta": THETA}
    assert gemma4({}).theta == THETA


def check_siglip(found: SiglipConfig, theirs: Any) -> None:
    assert (found.hidden, found.intermediate) == (theirs.hidden_size, theirs.intermediate_size)
    assert (found.layers, found.heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (found.image_size, found.patch_size) == (theirs.image_size, theirs.patch_size)
    assert (found.activation, found.norm_eps) == (theirs.hidden_act, theirs.layer_norm_eps)


def check_qwen(found: QwenTowerConfig, theirs: Any) -> None:
    assert (found.hidden, found.intermediate) == (theirs.hidden_size, theirs.intermediate_size)
    assert (found.layers, found.heads) == (theirs.depth, theirs.num_heads)
    assert (found.patch_size, found.frames) == (theirs.patch_size, theirs.temporal_patch_size)
    assert (found.merge, found.out_hidden) == (theirs.spatial_merge_size, theirs.out_hidden_size)
    assert found.activation == theirs.hidden_act
    assert found.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("read", "config", "named"),
    [
        (idefics3, {"scale_factor": 5}, "scale_factor"),
        (idefics3, {"vision_config": {"num_channels": 1}}, "num_channels"),
        (idefics3, {"vision_config": {"hidden_act": "mish"}}, "hidden_act"),
        (idefics3, {"vision_config": {"patch_size": [4, 4]}}, "patch_size"),
        (idefics3, {"vision_config": {"image_size": 8, "patch_size": 16}}, "image_size"),
        (gemma3, {"mm_tokens_per_image": 48}, "mm_tokens_per_image"),
        (gemma3, {"mm_tokens_per_image": 256}, "mm_tokens_per_image"),
        (gemma4, {"vision_config": {"head_dim": 30}}, "head_dim 30"),
        (gemma4, {"vision_config": {"num_key_value_heads": 6}}, "num_key_value_heads"),
        (gemma4, {"vision_config": {"hidden_activation": "mish"}}, "hidden_activation"),
        (gemma4, {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type"),
        (gemma4, {"image_processor": {"max_soft_tokens": 0}}, "max_soft_tokens"),
        (gemma4, {"image_processor": {"max_soft_tokens": 3414}}, "position_embedding_size"),
        (llava_next, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        (llava_next, {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        (llava_next, {"vision_feature_layer": -14}, "vision_feature_layer"),
        (llava_next, {"vision_config": {"model_type": "siglip_vision_model"}}, "model_type"),
        (onevision, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio"),
        (onevision, {"projector_hidden_act": "mish"}, "projector_hidden_act"),
        (Qwen25VisionConfig.read, {"vision_config": {"window_size": 20}}, "window_size"),
        (
            Qwen25VisionConfig.read,
            {"vision_config": {"fullatt_block_indexes": 7}},
            "fullatt_block_indexes",
        ),
        (
            Qwen25VisionConfig.read,
            {"vision_config": {"hidden_size": 36, "num_heads": 6}},
            "num_heads",
        ),
        (
            Qwen3VisionConfig.read,
            {"vision_config": {"num_position_embeddings": 50}},
            "num_position_embeddings",
        ),
        (
            Qwen3VisionConfig.read,
            {"vision_config": {"deepstack_visual_indexes": [27]}},
            "deepstack_visual_indexes",
        ),
        (
            Qwen3VisionConfig.read,
            {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}},
            "rope_type",
        ),
    ],
)
def test_an_unsupported_variant_is_refused_by_name(
    read: Read, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read(config)
