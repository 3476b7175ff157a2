"""OLMoE against transformers: experts, and norms of queries and keys over all heads."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.olmoe import Olmoe
from tests.engine.models.test_olmo2 import normed_per_head
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import OlmoeConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 128,
    }
    return OlmoeConfig(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of transformers 4, and leave out what has defaults."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["num_experts"] = config.pop("num_local_experts", None) or config["num_experts"]
    for key in ("norm_topk_prob", "attention_bias", "tie_word_embeddings"):
        del config[key]


ROPE = {"rope_type": "default", "rope_theta": 500.0}
CASE = Case(
    "experts",
    config,
    without={"norm_topk_prob": True},
    zeroed=["experts.3.gate_proj", "mlp.gate.weight", "q_norm", "k_norm"],
    replaced={"engine.models.olmo2.Olmo2Attention.forward": normed_per_head},
)
SPELLINGS = [
    Case("as-released", lambda: config(rope_parameters=ROPE), edit=as_released),
    Case("renormalised, tied", lambda: config(norm_topk_prob=True, tie_word_embeddings=True)),
]


@golden_tests([CASE])
def test_olmoe_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_olmoe_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [{"clip_qkv": 8.0}, {"head_dim": 16}, {"sliding_window": 20}, {"num_experts_per_tok": 9}],
    ids=str,
)
def test_olmoe_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Olmoe.read_config(config().to_dict() | wrong)
