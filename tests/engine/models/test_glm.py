"""GLM-4's first releases against transformers: partial rotary of neighbouring dimensions."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.glm import Glm, glm_facts
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import GlmConfig

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
    return GlmConfig(**(small | overrides))


def rope(share: float, **more: Any) -> dict[str, Any]:
    default = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    return default | more


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of transformers 4."""
    parameters = config.pop("rope_parameters")
    config |= {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor")}


def sparse(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove what has defaults."""
    for key in ("rope_parameters", "attention_bias", "tie_word_embeddings"):
        del config[key]


def of_halves(config: dict[str, Any]) -> dict[str, Any]:
    """Stand-in for glm_facts without the rotation of neighbouring dimensions."""
    return glm_facts(config) | {"pairs": False}


CASE = Case(
    "half",
    config,
    without={"rope_parameters": rope(1.0)},
    zeroed=["q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_up_proj"],
    replaced={"engine.models.glm.glm_facts": of_halves},
)
SPELLINGS = [
    Case("as-released", lambda: config(rope_parameters=rope(0.5, rope_theta=500.0)), as_released),
    Case("sparse", config, edit=sparse),
    Case("whole", lambda: config(rope_parameters=rope(1.0))),
    Case(
        "quarter, linear",
        lambda: config(rope_parameters=rope(0.25, rope_type="linear", factor=4.0)),
    ),
    Case("no-bias, tied", lambda: config(attention_bias=False, tie_word_embeddings=True)),
]


@golden_tests([CASE])
def test_glm_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_glm_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"rope_parameters": rope(1.5)}, "partial_rotary_factor = 1.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_glm_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Glm.read_config(config().to_dict() | wrong)
