"""Gemma 4 against transformers: layers of two shapes, keys as values, and layers without KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.gemma4 import Gemma4
from engine.models.gemma4_config import ROPE, TEXT_DEFAULTS
from tests.support.golden import (
    ANSWER,
    EQUALITIES,
    FEW,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    of_transformers,
    refusal,
    window_is_exact,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SLIDING, FULL = "sliding_attention", "full_attention"
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GLOBAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL] * 2,
    "rope_parameters": {FULL: GLOBAL, SLIDING: LOCAL},
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": False,
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# As in E2B: the last layers read the KV of the second and the third one.
SHARED = {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 211,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}


def config(**overrides: Any) -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(**(SMALL | KEYS_AS_VALUES | overrides))


def shared(**overrides: Any) -> Any:
    """Return a config like that of E2B."""
    plain = {"attention_k_eq_v": False, "num_global_key_value_heads": None}
    return config(**(plain | SHARED | overrides))


def multimodal(tied: bool) -> Any:
    from transformers import Gemma4Config

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {"intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8, "patch_size": 4}
    audio = {"subsampling_conv_channels": [4, 4], "output_proj_dims": 8}
    return Gemma4Config(
        text_config=SMALL | SHARED | {"tie_word_embeddings": tied},
        vision_config=small | vision | {"position_embedding_size": 840},
        audio_config=small | audio,
        tie_word_embeddings=tied,
        vocab_size=SMALL["vocab_size"],  # read by the golden tests alone
    )


def with_padding(config: Any, folder: Path) -> Any:
    """Return the reference of a multimodal config, which needs a padding token."""

    def prepare(model: Any) -> None:
        model.config.get_text_config().pad_token_id = 0

    return of_transformers(config, folder, prepare=prepare)


def published_spelling(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form of published checkpoints."""
    changes = next(iter(config.pop("per_layer_config").values()))
    config["global_head_dim"] = changes["head_dim"]
    config["num_global_key_value_heads"] = changes.get("num_key_value_heads")


def copied_head(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()


def published_e2b(config: dict[str, Any], tensors: Tensors) -> None:
    """Add the tensors that published checkpoints have for layers without KV of their own."""
    published_spelling(config, tensors)
    for name in list(tensors):
        if "layers.2.self_attn." in name and name.split(".")[-2] in ("k_proj", "v_proj", "k_norm"):
            tensors[name.replace("layers.2.", "layers.4.")] = tensors[name].clone()


CASE = Case(
    "dense",
    lambda: config(num_key_value_heads=4, final_logit_softcapping=8.0),
    without={
        "rope_parameters": {FULL: LOCAL, SLIDING: LOCAL},
        "final_logit_softcapping": None,
    },
    zeroed=["q_norm", "post_feedforward_layernorm"],
    replaced={
        "engine.models.gemma4.PlainRMSNorm.forward": lambda self, x: x,
        "engine.layers.norm.ScaledJoin.add": lambda self, x, delta, post: [x + post(delta)],
    },
    lengths=WINDOW_LENGTHS,
)
E2B = Case(
    "shared",
    shared,
    zeroed=["embed_tokens_per_layer", "per_layer_model_projection", "post_per_layer_input_norm"],
    lengths=WINDOW_LENGTHS,
)
MIXTURE = Case(
    "experts",
    lambda: config(**EXPERTS),
    zeroed=["router.scale", "router.per_expert_scale", "layernorm_1"],
)
SPELLINGS = [
    Case("published", config, edit=published_spelling),
    Case("published-e2b", shared, edit=published_e2b),
    Case("one-shape", lambda: config(global_head_dim=16, num_global_key_value_heads=2)),
    Case("biases", lambda: config(attention_bias=True)),
]


def part_is_reused(golden: Golden) -> None:
    """The beginning of a block is copied for each group, whose layers have another shape."""
    first = (golden.prompts[-1] * 2)[:100]
    second = [*first[:45], *first[:40]]
    answers = []
    for is_cached in (True, False):
        driver = golden.driver(block_size=64, enable_prefix_caching=is_cached)
        for prompt, hit in ((first, 0), (second, 32 * is_cached)):
            request = driver.submit(prompt, ANSWER, logprobs=0)
            driver.run()
            assert driver.cached_tokens(request) == hit
        answers.append((driver.tokens(request), driver.logprobs(request)))
    assert answers[0] == answers[1]


@golden_tests([CASE], [*EQUALITIES, window_is_exact], quick=[full_prefill])
def test_gemma4_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([E2B], [*EQUALITIES, window_is_exact, part_is_reused], quick=FEW[:4])
def test_gemma4_shared_kv_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([MIXTURE], EQUALITIES, quick=[full_prefill])
def test_gemma4_experts_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_gemma4_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def accounts_for_text_tensors(golden: Golden) -> None:
    """Every tensor outside the other towers is required, and further tensors are refused."""
    missing = "model.language_model.layers.3.layer_scalar"
    assert missing in refusal(golden, lambda config, tensors: tensors.pop(missing))
    for surplus in ("model.language_model.vision_tower.weight", "model.talker.weight"):
        extra = {surplus: torch.ones(1)}
        assert surplus in refusal(golden, lambda config, tensors, e=extra: tensors.update(e))


@golden_tests(
    [
        Case("whole", lambda: multimodal(tied=False), reference=with_padding, lengths=(33,)),
        Case(
            "tied",
            lambda: multimodal(tied=True),
            copied_head,
            lengths=(33,),
            reference=with_padding,
        ),
    ],
    [full_prefill, accounts_for_text_tensors],
    quick=[full_prefill],
)
def test_gemma4_multimodal_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def test_gemma4_text_config_ignores_no_tensors_of_towers() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = Gemma4(config().to_dict(), max_positions=128, dtype=torch.float32)
    assert not model.weight_map().ignored_prefixes


def test_gemma4_sparse_text_config_gets_transformers_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    defaults = transformers.Gemma4TextConfig()
    assert {key: getattr(defaults, key) for key in TEXT_DEFAULTS if key != "head_dim"} == {
        key: value for key, value in TEXT_DEFAULTS.items() if key != "head_dim"
    }
    assert defaults.rope_parameters == ROPE
    sparse = {  # as in google/gemma-4-E2B
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    }
    found = Gemma4.read_config({"text_config": sparse})
    assert found == Gemma4.read_config(transformers.Gemma4Config(text_config=sparse).to_dict())
    assert (found.head_dim, found.global_head_dim, found.per_layer) == (256, 512, 256)
    assert found.reads == (*[None] * 15, *([13] * 4 + [14]) * 4)
    assert {found.width(14), found.width(15)} == {6144, 12288}
    assert (found.rope_scaling.kind, found.rope_scaling.share) == ("proportional", 0.25)


def test_gemma4_layer_types_end_with_a_global_layer() -> None:
    """As in transformers, where every sixth layer is global by default."""
    pytest.importorskip("transformers")
    for layers in (7, 12):
        text = config(num_hidden_layers=layers, layer_types=None).to_dict()
        kinds = text.pop("layer_types")
        windows = Gemma4.read_config(text).windows
        assert [FULL if window is None else SLIDING for window in windows] == kinds
        sliding = text | {"layer_types": [SLIDING] * layers, "per_layer_config": {}}
        assert Gemma4.read_config(sliding).windows == (*[WINDOW] * (layers - 1), None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"hidden_activation": "relu"}, "hidden_act = 'relu'"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"rope_parameters": LOCAL}, "full_attention each"),
        ({"rope_parameters": {FULL: GLOBAL}}, "full_attention each"),
        ({"rope_parameters": {FULL: GLOBAL, SLIDING: LOCAL | {"rope_type": "x"}}}, "type 'x'"),
        (
            {"rope_parameters": {FULL: GLOBAL | {"rope_type": "linear"}, SLIDING: LOCAL}},
            "partial_rotary_factor = 0.5",
        ),
        ({"per_layer_config": [1]}, "per_layer_config = "),
        ({"per_layer_config": {"1": {"intermediate_size": 9}}}, "with intermediate_size"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "layers of one kind differ"),
        ({"per_layer_config": {"full_attention": {"head_dim": 32}}}, "of 'full_attention'"),
        ({"per_layer_config": {"1": {"head_dim": 9}, "3": {"head_dim": 9}}}, "head_dim = 9"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4"),
        ({"num_kv_shared_layers": 3}, "no full_attention layer before"),
        ({"num_kv_shared_layers": "1"}, "num_kv_shared_layers = '1'"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 210},
            "vocab_size_per_layer_input = 210",
        ),
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input = -8"),
        ({**EXPERTS, "top_k_experts": 5}, "top_k_experts 5"),
        ({**EXPERTS, "num_experts": None}, "num_experts"),
        ({"layer_types": "full"}, "layer_types = 'full'"),
        ({"layer_types": ["full"] * 4}, "layer_types"),
        ({"text_config": 3}, "text_config = 3"),
        ({"text_config": {"tie_word_embeddings": True}}, "tie_word_embeddings = True"),
    ],
    ids=str,
)
def test_gemma4_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Gemma4.read_config(config().to_dict() | wrong)
