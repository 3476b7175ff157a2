"""nanochat: the first generation against transformers, later ones against a naive model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.attention.batch import ForwardBatch
from engine.errors import ConfigError
from engine.models.nanochat import NanoChat
from engine.offline.nanochat.checkpoint import find_checkpoint
from engine.offline.nanochat.command import convert
from engine.offline.nanochat.tokenizer import write_json
from engine.ops.kernels import Kernels
from engine.ops.rotary import apply_rotary
from tests.support.golden import (
    VISIBLE,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    Tensors,
    difference,
    full_prefill,
    golden_tests,
    greedy,
    setting,
)
from tests.support.naive_nanochat import Naive, Sizes
from tests.support.nanochat_files import save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import NanoChatConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return NanoChatConfig(**(small | overrides))


def imported(naive: Naive, folder: Path) -> Naive:
    """Import the checkpoint of `naive` into `folder`, without a tokenizer.

    The windows are those of `naive`, because upstream's rule allows none as short as a test needs.
    """
    checkpoint = find_checkpoint(save_checkpoint(folder / "source", naive), None)
    facts, tensors = convert(checkpoint, print)
    facts["layer_windows"] = [back + 1 for back in naive.windows]
    write_json(folder / "config.json", facts)
    save_file(tensors, folder / "model.safetensors")
    return naive


SHORT, LONG = WINDOW - 1, 128  # number of keys before the query's own
NEWEST = Naive(windows=(SHORT, SHORT, SHORT, LONG, LONG))
MIDDLE = Naive(
    Sizes(n_layer=4, window_pattern="SL"),
    windows=(SHORT, LONG, SHORT, LONG),
    rope_base=10_000.0,
    qk_factor=1.0,
    gate=(32, 2.0),
    smear=False,
)


ROTATE = "engine.ops.rotary.apply_rotary"


def by_plus_theta(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, kernels: Kernels
) -> torch.Tensor:
    """Stand-in for apply_rotary with the sign that other models use."""
    return apply_rotary(x, cos, -sin, kernels=kernels)


def smeared_start(self: NanoChat, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Stand-in for NanoChat.smear that also smears a token before position 0."""
    before = self.embed(torch.full_like(batch.input_ids, 7))
    is_first = (batch.positions == 0).unsqueeze(-1)
    return _smear(self, x, batch) + torch.where(is_first, before, 0)


_smear = NanoChat.smear


def case(name: str, naive: Naive, **what: Any) -> Case:
    return Case(name, lambda: naive, reference=imported, lengths=WINDOW_LENGTHS, **what)


CASES = [
    Case(
        "first",
        config,
        without={"final_logit_softcapping": 1e4, "rms_norm_eps": 0.5},
        replaced={ROTATE: by_plus_theta},
    ),
    case("middle", MIDDLE, zeroed=["x0_lambdas", "value_embeds", "ve_gate"]),
    case(
        "newest",
        NEWEST,
        zeroed=["smear_lambda", "smear_gate", "x0_lambdas", "value_embeds", "ve_gate", "backout"],
        without={
            "qk_scale": 1.0,
            "layer_windows": [LONG + 1] * 5,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 0.5,
            "final_logit_softcapping": 1e4,
            "value_gate_range": 2.0,
            "backout_layer": 1,
        },
        replaced={ROTATE: by_plus_theta, "engine.models.nanochat.NanoChat.smear": smeared_start},
    ),
]
OTHERS = [
    case("march-9", replace(NEWEST, smear=False, qk_factor=1.15)),
    case("january-11", replace(MIDDLE, gate=None)),
]


@golden_tests(CASES)
def test_nanochat_matches_reference(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(OTHERS, [full_prefill, greedy])
def test_nanochat_intermediate_generation_matches_reference(
    golden: Golden, equality: Equality
) -> None:
    equality(golden)


def window_is_exact(golden: Golden) -> None:
    """A window longer or shorter by one key changes the logits visibly."""
    for short in (SHORT, SHORT + 2):
        windows = [short, short, short, LONG + 1, LONG + 1]
        assert difference(golden, setting("layer_windows", windows)) > VISIBLE


def residual_is_scaled(golden: Golden) -> None:
    def steady(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["model.resid_lambdas"].fill_(1)

    assert difference(golden, steady) > VISIBLE


@golden_tests([case("newest", NEWEST)], [window_is_exact, residual_is_scaled])
def test_nanochat_windows_and_lambdas_change_logits(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"num_key_value_heads": 4}, "6 attention heads .* 4 key/value heads"),
        ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
        ({"qk_scale": 1.2}, "lacks 'value_layers'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_nanochat_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        NanoChat.read_config(config().to_dict() | wrong)


@pytest.fixture(scope="module")
def newest_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("newest")
    imported(NEWEST, folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_windows": [20] * 4}, "4 layer_windows for 5 layers"),
        ({"layer_windows": [20, 20, 20, 0, 129]}, "layer_windows"),
        ({"layer_windows": 20}, "layer_windows = 20"),
        ({"value_layers": [0, 5]}, r"value_layers = \[0, 5\]"),
        ({"value_gate_range": None}, "lacks 'value_gate_range'"),
        ({"backout_layer": 5}, "backout_layer = 5"),
        ({"residual_lambdas": "yes"}, "residual_lambdas = 'yes'"),
        ({"qk_scale": "1.2"}, "qk_scale = '1.2'"),
        ({"smear_channels": 0}, "smear_channels = 0"),
    ],
)
def test_nanochat_invalid_setting_raises_config_error(
    wrong: dict[str, Any], said: str, newest_config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=said):
        NanoChat.read_config(newest_config | wrong)


OWN = (
    *("qk_scale", "layer_windows", "residual_lambdas", "value_layers", "value_gate_channels"),
    *("value_gate_range", "smear_channels", "backout_layer", "rope_theta"),
    *("final_logit_softcapping", "rms_norm_eps"),
)


@pytest.mark.parametrize("key", OWN)
def test_nanochat_missing_setting_raises_config_error(
    key: str, newest_config: dict[str, Any]
) -> None:
    rest = {name: value for name, value in newest_config.items() if name != key}
    with pytest.raises(ConfigError, match=f"lacks '{key}'"):
        NanoChat.read_config(rest)
