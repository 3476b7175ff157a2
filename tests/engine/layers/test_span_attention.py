"""SpanAttention: the kernel for bf16 next to attention in fp32, and units of a block."""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.numba.span_attention import supports
from engine.layers.mlp import ACTIVATIONS
from engine.layers.norm import LayerNorm
from engine.layers.span_attention import SpanAttention, Spans
from engine.models.vision.block import BlockShape, TowerLinear, VisionBlock
from engine.ops.norm import Tensors

LENGTHS = (70, 1, 64, 130)  # patches of each span
HEADS = 2
NEEDS_BF16 = pytest.mark.skipif(not supports(torch.bfloat16, 64), reason="needs AVX512_BF16")


def queries_keys_values(lengths: tuple[int, ...], dim: int, heads: int = HEADS) -> torch.Tensor:
    """Return [T, 3 * heads, dim]; the first span has scores of several hundred."""
    generator = torch.Generator().manual_seed(dim)
    made = torch.randn(sum(lengths), 3 * heads, dim, generator=generator)
    made[: lengths[0]] *= 6
    return made.bfloat16()


def attention(dim: int, heads: int = HEADS) -> SpanAttention:
    layer = SpanAttention(heads, dim)
    layer.kernels = "numba"
    return layer


def expected(qkv: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the outputs [T, heads * dim] in fp32."""
    parts = []
    for part in torch.split(qkv, list(lengths)):
        q, k, v = part.float().transpose(0, 1).chunk(3)
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
    return torch.cat(parts)


@NEEDS_BF16
@pytest.mark.parametrize("dim", [64, 80])
def test_kernel_for_bf16_attends_within_spans_only(dim: int) -> None:
    qkv = queries_keys_values(LENGTHS, dim)
    found = attention(dim)(*qkv.chunk(3, dim=1), Spans(LENGTHS))
    torch.testing.assert_close(found.float(), expected(qkv, LENGTHS), rtol=0.02, atol=0.02)


@NEEDS_BF16
def test_rows_in_parts_and_spans_alone_have_the_same_bits() -> None:
    qkv = queries_keys_values(LENGTHS, 64)
    layer = attention(64)
    whole = layer(*qkv.chunk(3, dim=1), Spans(LENGTHS))
    q, k, v = qkv.chunk(3, dim=1)
    attended = layer.begin(q, k, v, Spans(LENGTHS))
    edges = [0, 3, 69, 150, len(qkv)]
    parts = [attended(slice(*pair)) for pair in pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    alone = layer(*qkv[71:135].chunk(3, dim=1), Spans(LENGTHS[2:3]))
    assert torch.equal(alone, whole[71:135])


@NEEDS_BF16
def test_nan_stays_in_its_span() -> None:
    qkv = queries_keys_values(LENGTHS, 64)
    qkv[0] = float("nan")
    found = attention(64)(*qkv.chunk(3, dim=1), Spans(LENGTHS))
    assert found[:70].isnan().all()
    assert found[70:].isfinite().all()


def finished(units: Generator[None, int | None, Tensors], most: int | None) -> tuple[Tensors, int]:
    """Run units of at most this many rows. Return the result and the number of units."""
    next(units)
    count = 1
    while True:
        try:
            units.send(most)
        except StopIteration as end:
            return end.value, count
        count += 1


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("torch", torch.float32), pytest.param("numba", torch.bfloat16, marks=NEEDS_BF16)],
)
@torch.inference_mode()
def test_block_in_small_units_has_the_same_bits(kernels: str, dtype: torch.dtype) -> None:
    shape = BlockShape(
        hidden=128,
        intermediate=64,
        heads=2,
        activation=ACTIVATIONS["gelu_pytorch_tanh"],
        norm=lambda: LayerNorm(128, 1e-6),
    )
    block = VisionBlock(shape).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    for module in block.modules():
        if hasattr(module, "kernels"):
            setattr(module, "kernels", kernels)  # noqa: B010
        if isinstance(module, TowerLinear):
            module.prepack()
    x, delta = torch.randn(2, sum(LENGTHS), 128, generator=generator).to(dtype)
    whole, few = finished(block(x, delta, Spans(LENGTHS), None), None)
    small, many = finished(block(x, delta, Spans(LENGTHS), None), 100)
    assert (few, many) == (2, 6)
    for found, right in zip(small, whole, strict=True):
        assert torch.equal(found, right)
