"""Mistakes in a model file raise an error where they are made, not where they first matter."""

from __future__ import annotations

import pytest
from torch import nn

from engine.attention.spec import AttentionSpec
from engine.checkpoint.weight_map import targets_by_module
from engine.layers.attention import Attention, kv_specs
from engine.layers.linear import Linear

SPEC = AttentionSpec(2, 1, 8, scale=1.0)
MODEL = nn.ModuleDict({"up": Linear(4, 4), "down": Linear(4, 4)})


def test_targets_by_module_missing_name_raises_assertion_error() -> None:
    with pytest.raises(AssertionError, match=r"down.weight: no checkpoint name for 'down'"):
        targets_by_module(MODEL, {"up": "fc1"})


def test_targets_by_module_duplicate_name_raises_assertion_error() -> None:
    with pytest.raises(AssertionError, match=r"fc1.weight fills both up.weight and down.weight"):
        targets_by_module(MODEL, {"up": "fc1", "down": "fc1"})


def test_kv_specs_wrong_layer_indices_raise_assertion_error() -> None:
    assert kv_specs(nn.ModuleList([Attention(SPEC, 1), Attention(SPEC, 0)])) == [SPEC, SPEC]
    for indices in ((-1, -1), (0, 0), (1, 2)):
        with pytest.raises(AssertionError, match="must have the indices 0, 1"):
            kv_specs(nn.ModuleList([Attention(SPEC, index) for index in indices]))
