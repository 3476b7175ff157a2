"""Mixtral against transformers: a router's choice of experts, and their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.mixtral import Mixtral
from tests.support.golden import Case, Equality, Golden, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import MixtralConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "sliding_window": None,
    }
    return MixtralConfig(**(small | overrides))


def first_experts(logits: torch.Tensor, per_token: int, **_: Any) -> Any:
    """Stand-in for `route` that does not look at the logits."""
    weights = logits.float().softmax(-1)[:, :per_token]
    chosen = torch.arange(per_token, device=logits.device).expand(len(logits), -1)
    return chosen, weights / weights.sum(-1, keepdim=True)


def not_renormalised(logits: torch.Tensor, per_token: int, **_: Any) -> Any:
    """Stand-in for `route` whose weights add up to less than 1."""
    weights, chosen = logits.float().softmax(-1).topk(per_token)
    return chosen, weights


@pytest.mark.parametrize("route", [first_experts, not_renormalised])
def test_routing_matters(goldens: Any, route: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.golden import VISIBLE, last_logits

    golden = goldens(CASE)
    monkeypatch.setattr("engine.layers.experts.route", route)
    assert (last_logits(golden, golden.runner) - golden.logits).abs().max() > VISIBLE


CASE = Case("experts", config, zeroed=["experts.3.w1", "experts.4.w2", "gate.weight"])


@golden_tests([CASE])
def test_mixtral_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_local_experts": 0}, "num_local_experts = 0"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6, but only 5 experts"),
        ({"num_experts_per_tok": None}, "lacks 'num_experts_per_tok'"),
    ],
    ids=["no experts", "too many", "missing"],
)
def test_mixtral_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Mixtral.read_config(config().to_dict() | wrong)
