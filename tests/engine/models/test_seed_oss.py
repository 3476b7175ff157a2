"""Seed-OSS against transformers: biases of queries, keys and values, and of the output."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import SeedOssConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return SeedOssConfig(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of transformers 4, and leave out what has defaults."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = {"rope_type": "default"}
    for key in ("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings"):
        del config[key]


ROPE = {"rope_type": "default", "rope_theta": 500.0}
CASE = Case("biases", config, zeroed=["q_proj.bias", "k_proj.bias", "v_proj.bias"])
SPELLINGS = [
    Case("as-released", lambda: config(rope_parameters=ROPE), edit=as_released),
    Case(
        "out-bias, tied",
        lambda: config(
            attention_bias=False, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        zeroed=["o_proj.bias"],
    ),
]


@golden_tests([CASE])
def test_seed_oss_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_seed_oss_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)
