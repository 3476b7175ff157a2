"""T5 against transformers: T5 1.0, 1.1 and Flan-T5, in all spellings of their tied weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.spec import AttentionSpec
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.models.t5 import T5
from engine.ops.gated import gelu_tanh_mul
from engine.ops.relative_bias import relative_buckets
from engine.runner.pending_step import PendingStep
from engine.scheduling.step import Step
from tests.support.golden import (
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    of_transformers,
    refusal,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import T5Config

    small = {
        "vocab_size": 211,
        "d_model": 48,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 30,  # below the lengths, so that the last bucket is used
    }
    return T5Config(**(small | overrides))


def no_distance(distance: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.zeros_like(distance)


def scaled(heads: int, kv_heads: int, dim: int, scale: float, **facts: Any) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, scale=dim**-0.5, **facts)


def own_head(model: Any) -> None:
    """Give the head its own weights, as in T5 1.1; transformers ties it even if untied."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(model.lm_head.weight.shape, generator=generator) * 2 * 48**-0.5
    model.lm_head.weight = torch.nn.Parameter(weight)


def first_spelling(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to that of the published T5 1.1, which does not mention scaling."""
    del config["scale_decoder_outputs"]
    config["tie_word_embeddings"] = False


def with_copies(config: dict[str, Any], tensors: Tensors) -> None:
    """Add the copies of Flan-T5's files, and the unused bias of T5 1.0's files."""
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors.setdefault(name, tensors["shared.weight"].clone())
    cross = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[cross] = torch.ones(12, 4)


def one_copy(config: dict[str, Any], tensors: Tensors) -> None:
    """Keep one of equal tensors, under another name than `shared`, as some savers do."""
    tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")


def terse(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form that transformers 2 wrote."""
    for key in ("dense_act_fn", "feed_forward_proj", "is_gated_act", "scale_decoder_outputs"):
        del config[key]
    for key in ("num_decoder_layers", "relative_attention_max_distance", "tie_word_embeddings"):
        del config[key]
    config["n_positions"] = 16  # the training length, which is no limit


def gated(activation: str = "gelu", **overrides: Any) -> Any:
    gate = f"gated-{activation}"
    return config(feed_forward_proj=gate, tie_word_embeddings=False, **overrides)


def centred(x: torch.Tensor, shape: Any, weight: Any, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, shape, weight, None, eps)


V11 = partial(of_transformers, prepare=own_head)
PARTS = [
    *("encoder.block.0.layer.0.SelfAttention.rel", "decoder.block.0.layer.0.SelfAttention.rel"),
    *("EncDecAttention.v", "encoder.final_layer_norm", "decoder.final_layer_norm"),
    *("encoder.block.0.layer.0.layer_norm", "encoder.block.0.layer.1.layer_norm"),
    *("decoder.block.0.layer.1.layer_norm", "DenseReluDense.wo"),
]
CASES = [
    Case(
        "v1.0",
        config,
        without={"scale_decoder_outputs": False},
        zeroed=PARTS,
        replaced={
            "engine.attention.torch.mask.relative_buckets": no_distance,
            "engine.models.t5.AttentionSpec": scaled,
            "engine.ops.norm.F.rms_norm": centred,
        },
    ),
    Case(
        "v1.1",
        gated,
        reference=V11,
        edit=first_spelling,
        without={"scale_decoder_outputs": True},
        zeroed=["lm_head", "wi_0", "wi_1"],
    ),
]
GELUS = {"gated-silu": ("silu", ["wi_0", "wi_1"], gelu_tanh_mul)}
SPELLINGS = [
    Case("v1.0-copies", config, edit=with_copies),
    Case("v1.0-one-copy", config, edit=one_copy),
    Case(
        "v1.0-terse",
        lambda: config(num_decoder_layers=3, relative_attention_max_distance=128),
        edit=terse,
    ),
    Case("v1.1-saved-today", gated, reference=V11),
    Case("v1.1-copies", gated, reference=V11, edit=with_copies),
    Case("v1.1-with-equal-head", gated),
    Case("silu", lambda: gated("silu"), replaced={"engine.models.t5.FEED_FORWARDS": GELUS}),
]


@golden_tests(CASES)
def test_t5_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_t5_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def encoded_once(golden: Golden) -> None:
    """Answers to one source share its cross-attention KV, at the same time and later."""
    driver, encoded = golden.driver(), []
    launch = driver.runner.launch

    def noting(step: Step) -> PendingStep:
        encoded.extend(encode.tokens for encode in step.encoder_inputs)
        return launch(step)

    driver.runner.launch = noting  # type: ignore[method-assign]
    first, second = golden.sources[0], golden.sources[2]
    for _ in range(2):
        ids = [
            driver.submit([0], 20, source=first, temperature=1.0, seed=seed) for seed in range(5)
        ]
        driver.run()
        assert len({tuple(driver.tokens(i)) for i in ids}) == 5
    assert encoded == [tuple(first)]
    driver.submit([0], 3, source=second)
    driver.submit([0], 3, source=second, salt="another tenant")
    driver.run()
    assert encoded[1:] == [tuple(second)] * 2


def refuses_another_copy(golden: Golden) -> None:
    def alter(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["encoder.embed_tokens.weight"][3, 4] += 0.5

    said = refusal(golden, alter)
    assert "encoder.embed_tokens.weight" in said
    assert "differs from shared.weight" in said


def finds_its_start(golden: Golden) -> None:
    """The start token is that of config.json, else generation_config.json, else padding."""
    folder = golden.folder
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 5}
    generation = folder / "generation_config.json"
    for start in ({"decoder_start_token_id": 7}, {"decoder_start_token_id": None}):
        (folder / "config.json").write_text(json.dumps(config | start))
        generation.write_text(json.dumps({"decoder_start_token_id": 6}))
        assert plan(folder).start_token == (7 if start["decoder_start_token_id"] else 6)
    generation.unlink()
    assert plan(folder).start_token == 5
    for wrong in ({"pad_token_id": None}, {"decoder_start_token_id": 211}):
        (folder / "config.json").write_text(json.dumps(config | start | wrong))
        with pytest.raises(ConfigError, match="decoder_start_token_id"):
            plan(folder)


def plan(folder: Path, **config: Any) -> ModelPlan:
    return ModelPlan(EngineConfig(model=str(folder), device="cpu", **config))


def takes_any_context(golden: Golden) -> None:
    assert plan(golden.folder).max_model_len == 512
    assert plan(golden.folder, max_model_len=700).max_model_len == 700


@golden_tests(
    [Case("v1.0", config, edit=with_copies)],
    [encoded_once, refuses_another_copy, takes_any_context, finds_its_start],
)
def test_t5_source_reuse_copies_context_and_start_token(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (12, 30), (8, 20), (64, 1000)])
def test_relative_buckets_match_transformers(bidirectional: bool, buckets: int, most: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.cat([torch.arange(-2000, 2001), torch.tensor([-(10**6), 10**6])])
    torch.testing.assert_close(
        relative_buckets(distance, buckets, most, bidirectional),
        T5Attention._relative_position_bucket(distance, bidirectional, buckets, most),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj = 'gelu'"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn = 'gelu'"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder"),
        ({"d_kv": None}, "lacks 'd_kv'"),
        ({"num_layers": 0}, "num_layers = 0"),
        ({"relative_attention_num_buckets": 2}, "num_buckets = 2"),
        ({"relative_attention_max_distance": 6}, "distance of 6"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_t5_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    given = config().to_dict() | wrong
    with pytest.raises(ConfigError, match=said):
        T5.read_config(given)
