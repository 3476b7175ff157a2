"""DeepSeek-V2 and V3 from GGUF files against `transformers`, and how experts are scored."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.folder import NOTES, model_folder
from engine.checkpoint.gguf.config import config_of
from engine.checkpoint.gguf.delta import without_drafter
from engine.checkpoint.gguf.settings import own_settings
from engine.checkpoint.gguf.shapes import shapes_of
from engine.errors import ConfigError
from tests.engine.checkpoint.gguf.test_models import HEADS, LOCAL, SIZES, YARN, logits_of
from tests.support.gguf_files import write_gguf
from tests.support.golden import TOLERANCE, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
BIAS = ("blk.1.exp_probs_b.bias",)  # DeepSeek-V3's
OWN = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 40,
    "expert_shared_count": 2,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
}
OF_V2 = {"expert_gating_func": 1, "expert_weights_norm": None}


def settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a file; None removes one. Underscores in pairs stand for dots."""
    own = OWN | {key.replace("__", "."): value for key, value in changes.items()}
    named = {f"deepseek2.{key}": value for key, value in own.items() if value is not None}
    return named | {"general.architecture": "deepseek2"}


SMALL = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    "routed_scaling_factor": 2.5,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}


def v3(**more: Any) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**(SIZES | HEADS | SMALL | more))


def v2(**more: Any) -> Any:
    from transformers import DeepseekV2Config

    method = "greedy" if more.get("n_group") == 1 else "group_limited_greedy"
    return DeepseekV2Config(**(SIZES | HEADS | SMALL | {"topk_method": method} | more))


PLAIN = {"rope_parameters": LOCAL, "norm_topk_prob": False, "tie_word_embeddings": True}
CASES: dict[str, Callable[[], Any]] = {
    "v3": v3,
    "v2 lite": lambda: v2(q_lora_rank=None, **ONE_GROUP),
    "v3 plain": lambda: v3(**PLAIN),
    "v3 without mscale": lambda: v3(rope_parameters=YARN),
    "v2": v2,
}
FEW = ("v3", "v2 lite")


def varied(model: Any) -> None:
    """Give each expert its own bias for the choice."""
    generator = torch.Generator().manual_seed(3)
    for name, values in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            values.copy_(torch.rand(values.shape, generator=generator))


def check(config: Any, folder: Path, *, is_old: bool = False) -> Path:
    """Compare logits from a GGUF file with those of transformers, and return the file."""
    reference = of_transformers(config, folder / "checkpoint", prepare=varied)
    file = write_gguf(folder / "model.gguf", folder / "checkpoint", "deepseek2", is_old=is_old)
    prompt = [(7 * index + 3) % 250 for index in range(100)]
    with torch.inference_mode():
        due = reference(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(file, prompt), due, **TOLERANCE)
    return file


@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_logits_equal_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    check(CASES[case](), tmp_path)


def test_old_file_of_v3_is_scored_by_sigmoids_and_says_so(tmp_path: Path) -> None:
    """It has whole weights of keys and values, no groups, and no kind of scores."""
    file = check(v3(**ONE_GROUP), tmp_path, is_old=True)
    assert "deepseek2.expert_gating_func" in (model_folder(str(file)) / NOTES).read_text()


@pytest.mark.parametrize(
    ("changes", "tensors", "name"),
    [
        ({}, BIAS, "DeepseekV3ForCausalLM"),
        ({"expert_gating_func": None}, BIAS, "DeepseekV3ForCausalLM"),
        ({"expert_gating_func": 0}, BIAS, "DeepseekV3ForCausalLM"),
        (OF_V2, (), "DeepseekV2ForCausalLM"),
        (OF_V2 | {"expert_gating_func": None}, (), "DeepseekV2ForCausalLM"),
    ],
)
def test_bias_for_the_choice_decides_where_the_file_says_nothing(
    changes: dict[str, Any], tensors: tuple[str, ...], name: str
) -> None:
    assert config_of(settings(**changes), 288, tensors)["architectures"] == [name]


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        (OF_V2, BIAS, "deepseek2.expert_gating_func = 1, but has the tensors exp_probs_b.bias"),
        ({}, (), "deepseek2.expert_gating_func = 2, but lacks the tensors exp_probs_b.bias"),
        ({"expert_gating_func": 3}, BIAS, "deepseek2.expert_gating_func = 3; served are"),
        ({"expert_gating_func": 1}, (), "deepseek2.expert_weights_norm = True for scores by"),
        ({"expert_gating_func": None}, (), "deepseek2.expert_weights_norm = True for scores by"),
    ],
)
def test_contradictory_routing_is_refused(
    changes: dict[str, Any], tensors: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(settings(**changes), 288, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__kv_lora_rank": None}, "lacks deepseek2.attention.kv_lora_rank"),
        ({"expert_count": None}, "lacks deepseek2.expert_count"),
        ({"attention__q_lora_rank": 0}, "deepseek2.attention.q_lora_rank = 0; it must be"),
        ({"expert_shared_count": 0}, "deepseek2.expert_shared_count = 0; it must be"),
        ({"leading_dense_block_count": -1}, "leading_dense_block_count = -1; it must be a number"),
        ({"expert_group_count": 2.5}, "deepseek2.expert_group_count = 2.5; it must be a number"),
        ({"expert_weights_scale": "x"}, "deepseek2.expert_weights_scale = 'x'; it must be"),
        ({"expert_weights_norm": 1}, "deepseek2.expert_weights_norm = 1; it must be"),
        ({"rope__dimension_count": 24}, "rope.dimension_count 24, which must be below the 24"),
        ({"attention__value_length_mla": None}, "lacks deepseek2.attention.value_length_mla"),
        ({"attention__head_count_kv": 2}, "deepseek2.attention.head_count_kv = 2; by its other"),
        ({"attention__key_length": 44}, "deepseek2.attention.key_length = 44; by its other"),
        ({"attention__value_length": 12}, "deepseek2.attention.value_length = 12; by its other"),
        ({"rope__scaling__factor": 4.0}, "deepseek2.rope.scaling.type = 'linear'"),
        ({"rope__scaling__attn_factor": 0.5}, "deepseek2.rope.scaling.attn_factor to 0.5"),
        ({"attention__temperature_scale": 0.1}, "deepseek2.attention.temperature_scale to 0.1"),
    ],
    ids=str,
)
def test_malformed_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(settings(**changes), 288, BIAS)


def test_multiplier_of_yarn_is_a_tenth_of_the_scale_of_all_dimensions() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    scaled = config_of(settings(**yarn, rope__scaling__yarn_log_multiplier=0.07), 288, BIAS)
    assert scaled["rope_scaling"]["mscale_all_dim"] == pytest.approx(0.7)
    assert scaled["rope_scaling"]["mscale"] == pytest.approx(0.7)
    plain = config_of(settings(**yarn), 288, BIAS)["rope_scaling"]
    assert "attention_factor" not in plain
    assert plain["mscale_all_dim"] == 0


def test_layers_that_draft_tokens_are_left_out() -> None:
    given = settings(nextn_predict_layers=1)
    shapes = shapes_of(given, 288).required
    assert "blk.1.attn_k_b.weight" in shapes
    tensors = shapes | {"blk.2.nextn.eh_proj.weight": (64, 128)}
    assert without_drafter(tensors, own_settings(given)) == shapes


def test_weights_of_keys_and_values_are_split_in_new_files_only() -> None:
    sizes = {"attention__key_length": 24, "attention__value_length": 12}
    old = settings(**sizes, attention__key_length_mla=None, attention__value_length_mla=None)
    found = shapes_of(settings(), 288).required
    assert found["blk.0.attn_k_b.weight"] == (4, 32, 16)
    assert found["blk.0.attn_v_b.weight"] == (4, 12, 32)
    assert shapes_of(old, 288).required["blk.0.attn_kv_b.weight"] == (4 * (16 + 12), 32)
