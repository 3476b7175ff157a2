"""The selection of kernels for a device, and how the layers of a model get them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from engine.layers.attention import Attention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import LayerNorm, RMSNorm
from engine.models.registry import model_class
from engine.ops import kernels
from engine.ops.kernels import Kernels, select_kernels, use_kernels
from tests.support.published import PUBLISHED

LAYERS = (Attention, LMHead, TokenEmbedding, Linear, MLP, LayerNorm, RMSNorm)


@pytest.mark.parametrize(
    ("device", "attention_backend", "installed", "expected"),
    [
        ("cuda", "triton", True, "triton"),
        ("cuda", "torch", True, "triton"),
        ("cuda", "torch", False, "torch"),
        ("cpu", "torch", True, "torch"),
        ("cpu", "triton", True, "torch"),  # the interpreter, in tests
        ("cpu", "numba", True, "numba"),
        ("cpu", "numba", False, "numba"),
    ],
)
def test_select_kernels_depends_on_device_and_attention_backend(
    device: str,
    attention_backend: str,
    installed: bool,
    expected: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`installed` is whether triton is."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: find_spec("sys") if installed else None)
    assert select_kernels(torch.device(device), attention_backend) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_use_kernels_sets_every_layer_of_a_model(name: str) -> None:
    _, _, build = model_class(PUBLISHED[name])
    with torch.device("meta"):
        model = build(PUBLISHED[name], max_positions=64, dtype=torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    assert {layer.kernels for layer in layers} == {"torch"}
    use_kernels(model, "triton")
    assert {layer.kernels for layer in layers} == {"triton"}
    assert getattr(model, "kernels", "triton") == "triton"
