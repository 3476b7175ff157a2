"""GLM-4-0414 against transformers: GLM's rotation, and norms after sublayers too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.models import test_glm
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import Glm4Config

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
    return Glm4Config(**(small | overrides))


def unbiased_as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of GLM-4-32B-0414, which has no biases."""
    test_glm.as_released(config, tensors)
    del config["tie_word_embeddings"]


NORMS = [
    *("input_layernorm", "post_self_attn_layernorm"),
    *("post_attention_layernorm", "post_mlp_layernorm"),
]
CASE = Case(
    "half",
    config,
    without={"rope_parameters": test_glm.rope(1.0)},
    zeroed=[*NORMS, "q_proj.bias", "gate_up_proj"],
    replaced={"engine.models.glm4.glm_facts": test_glm.of_halves},
)
SPELLINGS = [
    Case(
        "as-released",
        lambda: config(attention_bias=False, rope_parameters=test_glm.rope(0.5, rope_theta=500.0)),
        edit=unbiased_as_released,
    ),
    Case("tied", lambda: config(tie_word_embeddings=True)),
]


@golden_tests([CASE])
def test_glm4_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_glm4_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)
