"""Qwen3 with experts against transformers, with a layer that has none."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.qwen3_moe import Qwen3Moe
from tests.support.golden import Case, Equality, Golden, full_prefill, golden_tests, greedy

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import Qwen3MoeConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return Qwen3MoeConfig(**(small | overrides))


CASE = Case(
    "experts",
    config,
    without={"norm_topk_prob": False},
    zeroed=["experts.3.gate_proj", "mlp.gate.weight", "q_norm", "k_norm"],
)
EVERY_SECOND = Case(
    "every-second", lambda: config(mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=False)
)


@golden_tests([CASE])
def test_qwen3_moe_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([EVERY_SECOND], [full_prefill, greedy])
def test_experts_in_every_second_layer_match_transformers(
    golden: Golden, equality: Equality
) -> None:
    equality(golden)


def test_both_names_of_the_number_of_experts_are_read() -> None:
    pytest.importorskip("transformers")
    given = config().to_dict()
    given["num_experts"] = given.pop("num_local_experts")
    found = Qwen3Moe.read_config(given).experts
    assert found is not None
    assert found.count == 5


@pytest.mark.parametrize("wrong", [[1.5], 3, ["1"]])
def test_qwen3_moe_malformed_dense_layers_are_refused(wrong: Any) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        Qwen3Moe.read_config(config().to_dict() | {"mlp_only_layers": wrong})
