"""Gemma against transformers: (1 + weight) norms, GeGLU, scaled embeddings, rounding in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.layers.embedding import ScaledTokenEmbedding
from engine.models.gemma import Gemma
from engine.ops.gated import silu_mul
from engine.ops.norm import rms_norm
from tests.support.golden import (
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import GemmaConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return GemmaConfig(**(small | overrides))


def first_release(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit a checkpoint to the form of the first release.

    It says `gelu` for the tanh form, stores a copy of the head, has rope_theta at the top level,
    and does not mention tied embeddings.
    """
    config |= {"hidden_act": "gelu", "hidden_activation": None}
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    del config["tie_word_embeddings"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def unscaled(ids: torch.Tensor, weight: torch.Tensor, scale: float, **_: Any) -> torch.Tensor:
    """Stand-in for `embed` that leaves the scale out."""
    return weight[ids]


FEATURES = {
    "engine.layers.norm.OffsetRMSNorm.offset": False,
    "engine.layers.weights.table.embed": unscaled,
    "engine.layers.mlp.GATED": {"gelu_pytorch_tanh": silu_mul},
}
NORMS = ["input_layernorm", "post_attention_layernorm", "model.norm"]
CASE = Case("mqa", config, zeroed=NORMS, replaced=FEATURES)
SPELLINGS = [
    Case("first-release", config, edit=first_release),
    Case("untied-biases", lambda: config(tie_word_embeddings=False, attention_bias=True)),
]


@golden_tests([CASE])
def test_gemma_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_gemma_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_act": "silu"},
        {"hidden_activation": "gelu"},
        {"use_bidirectional_attention": True},
        {"rms_norm_eps": None},
    ],
    ids=str,
)
def test_gemma_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Gemma.read_config(config().to_dict() | wrong)


@pytest.mark.parametrize("hidden", [2048, 3072])
def test_scaled_embedding_bf16_rounds_like_transformers(hidden: int) -> None:
    """The factor is rounded to bf16 (sqrt(3072) = 55.43 becomes 55.5), then the product."""
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    weight = torch.randn(50, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    reference = gemma.GemmaTextScaledWordEmbedding(50, hidden, 0, embed_scale=hidden**0.5)
    with torch.device("meta"):
        ours = ScaledTokenEmbedding(50, hidden, hidden**0.5, torch.bfloat16)
    ours.weight = reference.weight = torch.nn.Parameter(weight)
    ids = torch.arange(50)
    assert torch.equal(ours(ids), reference(ids))
    exact = (weight.double() * hidden**0.5).bfloat16()
    assert not torch.equal(ours(ids), exact)


@pytest.mark.parametrize("hidden", [64, 256, 2304])
def test_offset_rms_norm_bf16_rounds_like_transformers(hidden: int) -> None:
    """The norm and the product with the weight are fp32; the result is rounded once."""
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(200, hidden, generator=generator) * 3).bfloat16()
    reference = gemma.GemmaRMSNorm(hidden, eps=1e-6).bfloat16()
    weight = torch.randn(hidden, generator=generator).bfloat16()
    reference.weight = torch.nn.Parameter(weight)
    found, due = rms_norm(x, weight, 1e-6, offset=True, kernels="torch"), reference(x)
    assert found.dtype == torch.bfloat16
    differ = (found != due).float().mean()
    assert differ < 1e-4, "more than another order of summation explains"
    factor = 1 + weight
    for too_early in (
        rms_norm(x, factor, 1e-6, kernels="torch"),
        rms_norm(x, torch.ones_like(x[0]), 1e-6, kernels="torch") * factor,
    ):
        assert (too_early != due).float().mean() > 0.01
