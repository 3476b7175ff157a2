"""OLMo 2 against transformers: norms after sublayers, query and key norms over all heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.layers.norm import RMSNorm
from engine.models.olmo2 import Olmo2, Olmo2Attention
from tests.support.golden import Case, Equality, Golden, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")
HEAD_DIM = 8


def config(**overrides: Any) -> Any:
    from transformers import Olmo2Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return Olmo2Config(**(small | overrides))


def normed_per_head(self: Olmo2Attention, *args: Any) -> torch.Tensor:
    """Stand-in for Olmo2Attention.forward that norms each head by itself."""
    for norm in (self.q_norm, self.k_norm):
        vars(norm)["forward"] = partial(each_head, norm)
    return _attention(self, *args)


def each_head(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, HEAD_DIM))
    return torch.nn.functional.rms_norm(heads, (HEAD_DIM,), None, norm.eps).flatten(1) * norm.weight


_attention = Olmo2Attention.forward
CASE = Case(
    "gqa",
    config,
    zeroed=["q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm"],
    replaced={"engine.models.olmo2.Olmo2Attention.forward": normed_per_head},
)
SPELLINGS = [Case("tied-biases", lambda: config(tie_word_embeddings=True, attention_bias=True))]


@golden_tests([CASE])
def test_olmo2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_olmo2_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_qkv": 8.0},
        {"layer_types": ["sliding_attention"] * 3},
        {"mlp_bias": True},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_olmo2_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Olmo2.read_config(config().to_dict() | wrong)
