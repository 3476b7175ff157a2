"""Granite 4 against transformers: Mamba-2 layers, whose states are kept, and attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.layers.norm import GroupedRMSNorm
from engine.layers.recurrent import CausalConv
from engine.models.granite import MULTIPLIERS
from engine.models.granite_hybrid import GraniteHybrid
from engine.ops.gated import silu
from tests.support.golden import (
    Case,
    Equality,
    Golden,
    Tensors,
    accounts_for_tensors,
    chunked_prefill,
    full_prefill,
    golden_tests,
    of_transformers,
)

LENGTHS = (1, 15, 16, 33, 49)  # the reference of the scan computes token by token
pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import GraniteMoeHybridConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 40,
        "shared_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "embedding_multiplier": 3.3,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.2,
    }
    return GraniteMoeHybridConfig(**(small | overrides))


def remembering(config: Any, folder: Path) -> Any:
    """Return the reference with states that last for many tokens."""

    def prepare(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.data -= 3.5

    return of_transformers(config, folder, prepare=prepare)


def of_own_input(self: CausalConv, x: torch.Tensor, *states: Any) -> torch.Tensor:
    """Stand-in for CausalConv.forward that forgets the inputs before each token's own."""
    assert self.bias is not None
    return silu(x * self.weight[:, 0, -1] + self.bias)


def ungated(self: GroupedRMSNorm, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Stand-in for GroupedRMSNorm.forward with the same gate everywhere, which the norm removes."""
    return _gated_norm(self, y, torch.full_like(z, 20.0))


_gated_norm = GroupedRMSNorm.forward
CASE = Case(
    "mamba",
    config,
    reference=remembering,
    lengths=LENGTHS,
    without=dict.fromkeys(MULTIPLIERS, 1.0),
    zeroed=[
        *("mamba.A_log", "mamba.D", "mamba.dt_bias", "mamba.norm", "conv1d.bias"),
        *("shared_mlp.output_linear", "input_layernorm", "post_attention_layernorm"),
    ],
    replaced={
        "engine.layers.recurrent.CausalConv.forward": of_own_input,
        "engine.layers.norm.GroupedRMSNorm.forward": ungated,
    },
)
EXPERTS = Case(
    "granite-hybrid-experts",
    lambda: config(
        num_local_experts=5,
        num_experts_per_tok=2,
        mamba_n_groups=1,
        position_embedding_type="rope",
        layer_types=["mamba", "attention", "mamba", "attention"],
    ),
    reference=remembering,
    lengths=LENGTHS,
    without={"position_embedding_type": "nope"},
    zeroed=["router", "block_sparse_moe.output_linear", "shared_mlp.output_linear"],
)


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Spell the config as in the checkpoints of IBM."""
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layers_block_type"] = [kinds[kind] for kind in config.pop("layer_types")]
    config["position_embedding_type"] = "nope"
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    del config["time_step_limit"]


SPELLINGS = [
    Case("published", config, as_published),
    # Granite 4.0 Micro, 1B and 350M, which have no recurrent layer.
    Case(
        "attention-only",
        lambda: config(layer_types=["attention"] * 4, position_embedding_type="rope"),
    ),
    Case(
        "tied-biases",
        lambda: config(
            tie_word_embeddings=True,
            attention_bias=True,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            mamba_d_conv=3,
        ),
    ),
]


@golden_tests([CASE], quick=(full_prefill, chunked_prefill))
def test_granite_hybrid_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", [CASE], ids=["mamba"], indirect=True)
def test_granite_hybrid_reuses_states_at_block_edges_only(golden: Golden) -> None:
    """States are kept behind 16 and 32 tokens, for any number of tokens that two prompts share."""
    driver, plain = golden.driver(), golden.driver(enable_prefix_caching=False)
    prompt, ending = golden.prompts[-1], [7, 150, 8, 33, 2]
    driver.submit(prompt, 1)
    driver.run()
    for shared, hit in ((15, 0), (16, 16), (31, 16), (33, 32)):
        found, due = (
            one.submit([*prompt[:shared], *ending], 6, logprobs=0) for one in (driver, plain)
        )
        driver.run()
        plain.run()
        assert driver.cached_tokens(found) == hit
        assert driver.tokens(found) == plain.tokens(due)
        assert driver.logprobs(found) == plain.logprobs(due)


@pytest.mark.slow
@pytest.mark.parametrize("golden", [CASE], ids=["mamba"], indirect=True)
def test_granite_hybrid_rejected_drafts_change_nothing(golden: Golden) -> None:
    driver, plain = golden.driver(speculation="ngram"), golden.driver()
    prompt = golden.prompts[1] * 2
    # The answer to the first prompt is drafted for the second one, which has another answer.
    for first in (prompt[0], prompt[0] + 1, prompt[0]):
        found, due = (one.submit([first, *prompt[1:]], 24, logprobs=0) for one in (driver, plain))
        driver.run()
        plain.run()
        assert driver.tokens(found) == plain.tokens(due)
        assert driver.logprobs(found) == plain.logprobs(due)
    assert 0 < driver.stats.drafted_right < driver.stats.drafted


@golden_tests([EXPERTS], quick=(full_prefill, accounts_for_tensors))
def test_granite_hybrid_with_experts_matches_transformers(
    golden: Golden, equality: Equality
) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_granite_hybrid_spellings_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": ["mamba"] * 4},
        {"layer_types": None, "layers_block_type": None},
        {"layer_types": ["conv"] * 4},
        {"hidden_act": "gelu"},
        {"time_step_limit": [0.001, 0.1]},
        {"position_embedding_type": "alibi"},
        {"mamba_n_heads": 5},
        {"mamba_d_head": 8},
        {"mamba_n_groups": 4},
        {"mamba_d_conv": 1},
        {"num_experts_per_tok": 9, "num_local_experts": 5},
    ],
    ids=str,
)
def test_granite_hybrid_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GraniteHybrid.read_config(config().to_dict() | wrong)
