"""What the author of a model file forgets is named where it is, not where it first does harm."""

from __future__ import annotations

import pytest
from torch import nn

from engine.attention.spec import AttentionSpec
from engine.layers.attention import Attention, kv_specs
from engine.layers.linear import Linear
from engine.weights.rules import targets_by_module

SPEC = AttentionSpec(2, 1, 8, scale=1.0)
MODEL = nn.ModuleDict({"up": Linear(4, 4), "down": Linear(4, 4)})


def test_a_module_without_a_name_in_checkpoints() -> None:
    with pytest.raises(AssertionError, match=r"down.weight: what do checkpoints call 'down'"):
        targets_by_module(MODEL, {"up": "fc1"})


def test_two_modules_of_one_name() -> None:
    with pytest.raises(AssertionError, match=r"fc1.weight is up.weight and down.weight"):
        targets_by_module(MODEL, {"up": "fc1", "down": "fc1"})


def test_layers_that_would_share_their_kv() -> None:
    assert kv_specs(nn.ModuleList([Attention(SPEC, 1), Attention(SPEC, 0)])) == [SPEC, SPEC]
    for indices in ((-1, -1), (0, 0), (1, 2)):
        with pytest.raises(AssertionError, match="to be counted 0, 1"):
            kv_specs(nn.ModuleList([Attention(SPEC, index) for index in indices]))
