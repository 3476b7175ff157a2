"""Linear layers with norms, sums and activations in them, against today's separate ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from engine.kernels.triton import chips, folded_linear
from engine.kernels.triton.chips import Features, LinearTile, ShapeTile
from engine.ops.folded import RowNorm, Stream, embed_stream, linear_add, norm_linear
from engine.ops.gated import gelu_tanh_mul, silu_mul
from engine.ops.linear import linear
from engine.ops.norm import add_rms_norm, rms_norm
from tests.engine.kernels.triton.folded_launches import SIZES, Sizes
from tests.support.program_order import program_order

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
BF16 = torch.bfloat16
FOLDED = Features(folded=True)
ALL = FOLDED._replace(early_weights=True, split_inputs=True)
EPS = 1e-6
SMALL = Sizes(80, 100, 72, 56)  # no tile is full, and inputs take several rounds
TINY_TILE = LinearTile(outputs=16, inputs=16, stages=2, warps=2)


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    yield
    chips.force(None)


@pytest.fixture
def of_16_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add products as tensor cores do: 16 inputs at a time, in order, rounded to fp32 each time.

    The interpreter would round once a tile, so that tiles of other sizes have other bits.
    """
    product = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, total: Any, *rest: Any) -> Any:
        for first in range(0, a.data.shape[1], 16):
            of_a = TensorHandle(a.data[:, first : first + 16], a.dtype.scalar)
            of_b = TensorHandle(b.data[first : first + 16], b.dtype.scalar)
            total = product(self, of_a, of_b, total, *rest)
        return total

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class Layer(NamedTuple):
    """Weights of the linear layers of a decoder layer, without attention."""

    out: torch.Tensor
    mlp_norm: RowNorm
    up: torch.Tensor
    down: torch.Tensor
    attention_norm: RowNorm  # of the next layer
    qkv: torch.Tensor
    bias: torch.Tensor


class Inputs(NamedTuple):
    """A layer's inputs: the stream's ids and table, and the result of attention."""

    ids: torch.Tensor
    table: torch.Tensor
    attended: torch.Tensor

    def rows(self, first: int, end: int) -> Inputs:
        return Inputs(self.ids[first:end], self.table, self.attended[first:end])


def drawn(sizes: Sizes, rows: int) -> tuple[Layer, Inputs]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(BF16)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return draw(outputs, inputs, scale=inputs**-0.5)

    hidden, qkv, attended, intermediate = sizes
    norms = [RowNorm(1 + draw(hidden, scale=0.1), EPS, False) for _ in range(2)]
    layer = Layer(
        weight(hidden, attended),
        norms[0],
        weight(2 * intermediate, hidden),
        weight(hidden, intermediate),
        norms[1],
        weight(qkv, hidden),
        draw(qkv),
    )
    ids = torch.randint(9, (rows,), generator=generator)
    return layer, Inputs(ids, draw(9, hidden), draw(rows, attended))


def folded(layer: Layer, given: Inputs) -> tuple[torch.Tensor, Stream]:
    """Return the next layer's projections [T, qkv] and the stream after this layer."""
    stream = embed_stream(given.ids, given.table, 1.0)
    stream = linear_add(given.attended, layer.out, None, stream)
    gated = norm_linear(stream, layer.mlp_norm, layer.up, None, "silu")
    stream = linear_add(gated, layer.down, None, stream)
    return norm_linear(stream, layer.attention_norm, layer.qkv, layer.bias), stream


def separate(layer: Layer, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `folded` does by today's ops, in torch."""
    kernels: Any = {"kernels": "torch"}
    x = given.table[given.ids]
    attended = linear(given.attended, layer.out, **kernels)
    x, normed = add_rms_norm(x, attended, layer.mlp_norm.weight, EPS, **kernels)
    delta = linear(silu_mul(linear(normed, layer.up, **kernels), "torch"), layer.down, **kernels)
    x, normed = add_rms_norm(x, delta, layer.attention_norm.weight, EPS, **kernels)
    return linear(normed, layer.qkv, layer.bias, **kernels), x


def check_layer(sizes: Sizes, rows: int, features: Features) -> None:
    chips.force(features)
    layer, given = drawn(sizes, rows)
    found, stream = folded(layer, given)
    due, total = separate(layer, given)
    # Both round to bf16 five times, but not at the same places; values are of the order of 1.
    for one, other in ((found, due), (stream.x, total)):
        torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=6e-2)
    squares = stream.x.float().square().sum(1)
    torch.testing.assert_close(stream.squares.sum(1), squares, rtol=1e-5, atol=1e-5)
    assert not stream.counters.any()


@pytest.mark.parametrize("features", [FOLDED, ALL], ids=["folded", "all"])
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 33, 64])
@pytest.mark.variants(4)
def test_folded_layer_of_every_tile_equals_separate_ops(rows: int, features: Features) -> None:
    check_layer(SMALL, rows, features)


def test_folded_layer_of_a_published_width_equals_separate_ops() -> None:
    """Programs share the inputs of `out`, and a row of the stream has 64 parts."""
    check_layer(SIZES["qwen3-0.6b"]._replace(qkv=256, intermediate=96), 2, ALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("name", SIZES)
def test_folded_layer_of_every_published_size_equals_separate_ops(name: str, rows: int) -> None:
    check_layer(SIZES[name], rows, ALL)


EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63)  # of the tiles of rows


@pytest.mark.parametrize(
    ("features", "counts"),
    [
        pytest.param(FOLDED, EDGES[::3], id="folded"),
        pytest.param(ALL, EDGES, id="all"),
        pytest.param(ALL, range(1, 64), id="all, each", marks=pytest.mark.slow),
    ],
)
@pytest.mark.variants(1)
def test_bits_of_a_row_are_equal_from_1_to_64_rows(
    features: Features,
    counts: Sequence[int],
    of_16_inputs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All tiles take part, and with `all` two programs share the inputs of an output."""
    monkeypatch.setattr(folded_linear, "SHARE_MULTIPLE", 32)
    monkeypatch.setattr(folded_linear, "NUM_SMS", 4)
    chips.force(features)
    layer, given = drawn(Sizes(80, 24, 72, 40), 64)
    due, total = folded(layer, given)
    assert total.squares.shape == (64, 2)
    for rows in counts:
        found, stream = folded(layer, given.rows(0, rows))
        assert torch.equal(found, due[:rows]), rows
        assert torch.equal(stream.x, total.x[:rows]), rows
    for row in (1, 31, 63):  # the place in the tile
        assert torch.equal(folded(layer, given.rows(row, row + 1))[0], due[row : row + 1])


def test_bits_of_plain_products_are_equal_from_1_to_64_rows(of_16_inputs: None) -> None:
    """So are logits, which are not rounded to bf16."""
    chips.force(ALL)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 300, generator=generator).to(BF16)
    weight = torch.randn(37, 300, generator=generator).to(BF16)
    due = linear(x, weight, dtype=torch.float32, kernels="triton")
    torch.testing.assert_close(due, x.float() @ weight.float().t(), rtol=1e-4, atol=1e-3)
    for rows in range(1, 64):
        found = linear(x[:rows], weight, dtype=torch.float32, kernels="triton")
        assert torch.equal(found, due[:rows]), rows


def test_parts_of_squares_have_the_order_of_the_whole_sum() -> None:
    """A wider tile leaves fewer parts; the sum of squares keeps its bits."""
    weight, x = torch.eye(128).to(BF16), torch.randn(3, 128).to(BF16)
    norm = RowNorm(torch.ones(128, dtype=BF16), EPS, False)
    results = []
    for outputs in (16, 32, 64, 128):
        tile = LinearTile(outputs, 64, 2, 2)
        chips.force(FOLDED._replace(tiles=(ShapeTile(128, 128, tile),)))
        nothing = Stream(torch.zeros(3, 128, dtype=BF16), *[torch.zeros(0)] * 2)
        stream = linear_add(x, weight, None, nothing)
        assert stream.squares.shape == (3, 128 // outputs)
        results.append(norm_linear(stream, norm, weight, None))
    assert all(torch.equal(one, results[0]) for one in results[1:])
    due = rms_norm(x, norm.weight, EPS, kernels="torch")
    torch.testing.assert_close(results[0], due, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 17])
def test_shared_inputs_have_the_same_bits_in_every_program_order(rows: int) -> None:
    """Also if launched twice, with the counters of the first time."""
    chips.force(ALL)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1000, generator=generator).to(BF16)
    weight = torch.randn(50, 1000, generator=generator).to(BF16)
    bias = torch.randn(50, generator=generator).to(BF16)
    counters = torch.zeros(50, dtype=torch.int32)
    before = Stream(torch.randn(rows, 50, generator=generator).to(BF16), torch.zeros(0), counters)
    due = linear_add(x, weight, bias, before)
    exact = before.x.double() + x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(due.x.double(), exact, rtol=2e-2, atol=1e-1)
    for seed in range(6):
        with program_order(seed) as orders:
            for _ in range(2):
                found = linear_add(x, weight, bias, before)
                assert torch.equal(found.x, due.x)
                assert torch.equal(found.squares, due.squares)
                assert not counters.any()
        programs = len(orders[0])
        assert programs == 4 * due.squares.shape[1], "four programs share the inputs"


def test_shares_added_by_the_first_arriver_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the program of the last inputs adds, whether or not the others have ended."""
    chips.force(ALL)
    x, weight = torch.ones(1, 1000).to(BF16), torch.ones(50, 1000).to(BF16)
    counters = torch.zeros(50, dtype=torch.int32)
    before = Stream(torch.zeros(1, 50, dtype=BF16), torch.zeros(0), counters)
    exact = linear_add(x, weight, None, before).x
    add = InterpreterBuilder.create_atomic_rmw

    def arrived(self: Any, *args: Any) -> Any:
        result = add(self, *args)
        share = np.full_like(result.data, self.grid_idx[1])
        return TensorHandle(share, tl.int32)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", arrived)
    found = []
    for seed in range(6):
        with program_order(seed):
            found.append(torch.equal(linear_add(x, weight, None, before).x, exact))
    assert not all(found)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_layer_with_bias_and_offset_norm_equals_separate_ops(kind: str) -> None:
    chips.force(ALL)
    generator = torch.Generator().manual_seed(0)
    ids, table = torch.tensor([3, 1, 2]), torch.randn(5, 48, generator=generator).to(BF16)
    weight = (torch.randn(60, 48, generator=generator) / 7).to(BF16)
    bias = torch.randn(60, generator=generator).to(BF16)
    norm = RowNorm(torch.randn(48, generator=generator).to(BF16), EPS, True)
    stream = embed_stream(ids, table, 6.5)
    found = norm_linear(stream, norm, weight, bias, kind)
    normed = rms_norm(table[ids] * 6.5, norm.weight, EPS, offset=True, kernels="torch")
    activate = silu_mul if kind == "silu" else gelu_tanh_mul
    due = activate(linear(normed, weight, bias, kernels="torch").float(), "torch")
    torch.testing.assert_close(found.float(), due, rtol=3e-2, atol=6e-2)


def test_tile_of_the_table_is_used_for_its_shape() -> None:
    chips.force(FOLDED._replace(tiles=(ShapeTile(64, 48, TINY_TILE),)))
    blocks = []
    for outputs, rows in ((64, 1), (64, 16), (32, 1), (64, 17)):
        weight = torch.zeros(outputs, 48)
        tile = folded_linear.work_of(weight, rows, weight.device, None, None).tile
        blocks.append((tile.outputs, tile.inputs))
    assert blocks == [(16, 16), (16, 16), (16, 64), (32, 64)]
