"""Rotary tables against transformers, and the rotation against complex multiplication."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.layers.rotary import RopeScaling, RotaryEmbedding, rope_frequencies, rope_theta
from engine.ops.rotary import apply_rotary, apply_rotary_pairs

pytestmark = pytest.mark.usefixtures("one_thread")
ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "rope_theta": 100.0, "high_freq_factor": 8.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0},  # the original length defaults to the configured one
    {"rope_type": "yarn", "factor": 16.0, **ORIGINAL, "beta_fast": 4.0, "beta_slow": 0.5},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 1.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": None, **ORIGINAL},  # the ratio of the two lengths
    {"rope_type": "yarn", "factor": 40.0, **ORIGINAL, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 40.0, **ORIGINAL, "mscale": 0.707, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 40.0, **ORIGINAL, "mscale": 0.707},
    {"rope_type": "yarn", "factor": 40.0, **ORIGINAL, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 40.0, **ORIGINAL, "mscale": 0.707, "mscale_all_dim": 0},
    {"rope_type": "yarn", "factor": 1.0, **ORIGINAL, "mscale": 0.707, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 0.5, **ORIGINAL, "mscale": 0.707, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": None, **ORIGINAL, "mscale": 2, "mscale_all_dim": 1},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        **ORIGINAL,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
        "attention_factor": 0.9,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "beta_fast": 0.5, "beta_slow": 8.0},
    {"rope_type": "proportional"},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 8.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.05},  # of 16 dimensions none
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, **ORIGINAL},  # not read by the reference
]


def config(parameters: dict[str, Any], head_dim: int) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0} | parameters,
    )


def reference(hf: Any, kind: str, length: int) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if kind == "default":
        return LlamaRotaryEmbedding(hf).inv_freq, 1.0
    return ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), seq_len=length)


def old_spelling(saved: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(saved["rope_parameters"])
    theta = parameters.pop("rope_theta")
    rest = {key: value for key, value in saved.items() if key != "rope_parameters"}
    return rest | {"rope_theta": theta, "rope_scaling": parameters}


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("parameters", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_rope_frequencies_match_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    hf = config(parameters, head_dim)
    expected, factor = reference(hf, parameters["rope_type"], 256)
    for saved in (hf.to_dict(), old_spelling(hf.to_dict())):
        found, scale = rope_frequencies(
            head_dim, rope_theta(saved), RopeScaling.from_hf(saved), 256
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert scale == pytest.approx(factor)


def test_yarn_factor_with_both_mscales_is_the_quotient_of_the_formula() -> None:
    given = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3}
    scaling = RopeScaling.from_hf({"max_position_embeddings": 256, "rope_scaling": given})
    _, factor = rope_frequencies(16, 10000.0, scaling, 256)
    growth = 0.1 * math.log(40.0)
    assert factor == pytest.approx((0.707 * growth + 1) / (1.3 * growth + 1))


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim", "attention_factor"])
def test_yarn_with_a_negative_factor_raises(key: str) -> None:
    given = {"rope_type": "yarn", "factor": 2.0, key: -1.0}
    with pytest.raises(ConfigError, match=f"{key} = -1.0"):
        RopeScaling.from_hf({"max_position_embeddings": 256, "rope_scaling": given})


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
    ],
)
def test_rope_scaling_missing_parameter_raises_config_error(kind: str, lacking: str) -> None:
    given = {"rope_type": kind, **LLAMA3}
    saved = {"max_position_embeddings": 256, "rope_parameters": given}
    RopeScaling.from_hf(saved)
    without = {k: v for k, v in given.items() if k != lacking}
    for absent in (without, *([] if kind == "yarn" else [given | {lacking: None}])):
        with pytest.raises(ConfigError, match=f"{kind} in config.json lacks {lacking}"):
            RopeScaling.from_hf(saved | {"rope_parameters": absent})


def test_dynamic_rope_equals_reference_at_longest_length() -> None:
    """The reference increases its base with the sequence length; we use the base of the longest.

    The tables therefore agree at the served length, and cached keys never change.
    """
    hf = config({"rope_type": "dynamic", "factor": 3.0}, 16)
    scaling = RopeScaling.from_hf(hf.to_dict())
    expected, _ = reference(hf, "dynamic", 700)
    found, scale = rope_frequencies(16, 10000.0, scaling, 700)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert scale == 1.0
    assert not torch.allclose(found, rope_frequencies(16, 10000.0, scaling, 256)[0])


@pytest.mark.parametrize("served", [64, 65])
@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"attention_factor": 1.5}], ids=str)
def test_longrope_frequencies_match_transformers(served: int, more: dict[str, Any]) -> None:
    """Up to the original length the short factors apply, beyond it the long ones."""
    short, long = [1.0 + pair / 8 for pair in range(8)], [2.0**pair for pair in range(8)]
    factors = {"short_factor": short, "long_factor": long}
    hf = config({"rope_type": "longrope", **factors, **ORIGINAL, **more}, 16)
    expected, factor = reference(hf, "longrope", served)
    scaling = RopeScaling.from_hf(hf.to_dict())
    found, scale = rope_frequencies(16, 10000.0, scaling, served)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(factor)


@pytest.mark.parametrize("head_dim", [2, 8, 64, 80])
@pytest.mark.parametrize("heads", [1, 3])
def test_apply_rotary_is_complex_multiplication(head_dim: int, heads: int) -> None:
    theta, positions = 1000.0, torch.tensor([0, 1, 7, 63, 62])
    rotary = RotaryEmbedding(head_dim, theta, RopeScaling(), 64, torch.float32)
    x = torch.randn(5, heads, head_dim, generator=torch.Generator().manual_seed(0))
    found = apply_rotary(x, *rotary(positions), kernels="torch")
    for token, position in enumerate(positions.tolist()):
        for pair in range(head_dim // 2):
            angle = position * theta ** (-2 * pair / head_dim)
            turn = complex(math.cos(angle), math.sin(angle))
            for head in range(heads):
                first, second = x[token, head, pair], x[token, head, pair + head_dim // 2]
                due = complex(first, second) * turn
                assert found[token, head, pair].item() == pytest.approx(due.real, abs=2e-5)
                there = found[token, head, pair + head_dim // 2].item()
                assert there == pytest.approx(due.imag, abs=2e-5)


def test_apply_rotary_pairs_is_complex_multiplication_of_neighbours() -> None:
    theta, positions = 1000.0, torch.tensor([0, 1, 7, 63, 62])
    rotary = RotaryEmbedding(16, theta, RopeScaling(), 64, torch.float32, pairs=True)
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    found = apply_rotary_pairs(x, *rotary(positions), kernels="torch")
    angles = positions[:, None, None] * theta ** (-torch.arange(0, 16, 2) / 16)
    turns = torch.polar(torch.ones_like(angles), angles)
    due = torch.view_as_complex(x.unflatten(-1, (8, 2))) * turns
    torch.testing.assert_close(found, torch.view_as_real(due).flatten(-2), rtol=0, atol=2e-5)


def test_apply_rotary_dot_products_depend_only_on_distance() -> None:
    rotary = RotaryEmbedding(32, 10000.0, RopeScaling(), 512, torch.float32)
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(0)).unbind()

    def score(query: int, key: int) -> float:
        turned_q = apply_rotary(q, *rotary(torch.tensor([query])), kernels="torch")
        turned_k = apply_rotary(k, *rotary(torch.tensor([key])), kernels="torch")
        return float((turned_q * turned_k).sum())

    assert score(9, 4) == pytest.approx(score(505, 500), abs=1e-3)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_rotary_attention_factor_scales_the_tables() -> None:
    scaling = RopeScaling("yarn", factor=4.0, original_max_positions=64, attention_factor=1.5)
    cos, sin = RotaryEmbedding(8, 10000.0, scaling, 16, torch.float32)(torch.tensor([3]))
    torch.testing.assert_close(cos**2 + sin**2, torch.full((1, 1, 8), 2.25))


def test_rotary_tables_are_computed_in_fp32_and_then_rounded() -> None:
    exact = RotaryEmbedding(16, 10000.0, RopeScaling(), 300, torch.float32)
    rounded = RotaryEmbedding(16, 10000.0, RopeScaling(), 300, torch.bfloat16)
    assert torch.equal(exact.angles.bfloat16(), rounded.angles)
