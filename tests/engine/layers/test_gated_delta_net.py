"""A gated delta net against the same computation in float64, one token after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.device.ranks import Ranks
from engine.errors import ConfigError
from engine.layers.divide import divide
from engine.layers.gated_delta_net import DeltaShape, GatedDeltaNet
from engine.layers.norm import GatedRMSNorm
from engine.layers.state import new_states
from engine.ops.state_runs import StateRuns
from tests.support.delta_rule import delta_rule

SHAPE = DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=4, conv_width=3)
HIDDEN, EPS = 20, 1e-5


def one_text(layer: GatedDeltaNet, count: int) -> Any:
    """Return the part of a ForwardBatch that a layer reads: the states of one text."""
    cpu = torch.device("cpu")
    states = new_states([layer.state.spec], 0, torch.float32, cpu)
    return SimpleNamespace(kv=SimpleNamespace(states=states), runs=StateRuns.of_text(count, cpu))


def drawn(module: torch.nn.Module, scale: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale


def by_hand(layer: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """Return the layer's output in float64."""
    layer, x = layer.double(), x.double()
    keys, values = 2 * 8, 6 * 4
    mixed = x @ layer.inputs.tensors.plain.T
    qkv, z = mixed[:, : 2 * keys + values], mixed[:, 2 * keys + values :]
    padded = F.pad(qkv, (0, 0, 2, 0))
    taps = layer.conv.weight[:, 0]
    qkv = F.silu(sum(padded[i : i + len(x)] * taps[:, i] for i in range(3)))
    q, k, v = qkv.split([keys, keys, values], dim=1)
    b, a = (x @ layer.rates.tensors.plain.T).split(6, dim=1)
    q, k = q.unflatten(1, (2, 8)), k.unflatten(1, (2, 8))
    read = delta_rule(q, k, v.unflatten(1, (6, 4)), a, b, layer.A_log, layer.dt_bias)
    normed = read / (read.square().mean(-1, keepdim=True) + EPS).sqrt() * layer.norm.weight
    return (normed * F.silu(z.unflatten(1, (6, 4)))).flatten(1) @ layer.out.tensors.plain.T


# With strong decays, a sum of their logarithms over many tokens would lose the digits of each.
@pytest.mark.parametrize("rate", [-4.0, 0.0, 4.0])
@torch.inference_mode()
def test_gated_delta_net_equals_steps_in_float64(rate: float) -> None:
    layer = GatedDeltaNet(HIDDEN, SHAPE, 0, EPS)
    drawn(layer, 0.7)
    layer.A_log += rate
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(3))
    found = layer(x, one_text(layer, len(x)))
    expected = by_hand(layer, x)
    assert expected.abs().mean() > 0.3
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_gated_rms_norm_in_bfloat16_rounds_once() -> None:
    norm = GatedRMSNorm(16, EPS)
    drawn(norm, 1.0)
    x, gate = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = norm.bfloat16()(x, gate)
    assert found.dtype == torch.bfloat16
    exact = norm.double()(x.double(), gate.double())
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


def test_ranks_beyond_the_key_heads_are_refused() -> None:
    """They would keep the same keys, and states of another size than their share."""
    with torch.device("meta"):
        layer = GatedDeltaNet(HIDDEN, SHAPE, 0, EPS)
    with pytest.raises(ConfigError, match="2 key heads, which 6 processes"):
        divide(layer, Ranks(0, 6))


def test_two_ranks_keep_half_of_the_state() -> None:
    with torch.device("meta"):
        layer = GatedDeltaNet(HIDDEN, SHAPE, 0, EPS)
    divide(layer, Ranks(1, 2))
    tail, matrix = layer.state.spec
    assert tail.shape == (2, 8 + 8 + 12) == (2, len(layer.conv.weight))
    assert matrix.shape == (3, 8, 4)
    assert matrix.dtype == torch.float32
    assert len(layer.A_log) == len(layer.dt_bias) == 3
