"""Linear layers and the LM head: stacked parts, prepacked weights, tied weights."""

from __future__ import annotations

import pytest
import torch

from engine.device.facts import onednn_has_matmul
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.weights.onednn import PackedWeight

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1e-2)}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
packing = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="packing weights needs oneDNN"
)
CPU = torch.device("cpu")


def fill(module: torch.nn.Module, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = values.to(dtype)
        parameter.requires_grad_(False)
    return module


def rows(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(9)).to(dtype)


def check(found: torch.Tensor, due: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), due, rtol=rtol, atol=atol)


@packing
@dtypes
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("sizes", [(48, 64), (97, 33), (576, 960)], ids=str)
def test_linear_plain_and_packed_match_fp64(
    sizes: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    linear = fill(Linear(*sizes, bias=bias), dtype)
    weight = linear.weight.double()
    offset = linear.bias.double() if bias else 0
    x = rows(33, sizes[0], dtype)
    check(linear(x), x.double() @ weight.T + offset, dtype)
    if onednn_has_matmul(CPU, dtype):
        linear.prepack()
        assert linear.weight is None, "the plain weight still takes memory"
    for count in (1, 2, 3, 33):
        found = linear(x[:count])
        assert found.dtype == dtype
        check(found, x[:count].double() @ weight.T + offset, dtype)


def test_linear_parts_are_row_slices_in_order() -> None:
    linear = Linear(8, {"q": 6, "k": 2, "v": 3}, bias=True)
    assert linear.tensors.slices == {"q": slice(0, 6), "k": slice(6, 8), "v": slice(8, 11)}
    fill(linear, torch.float32)
    x = rows(4, 8, torch.float32)
    stacked = linear(x)
    for part in linear.tensors.slices.values():
        due = x.double() @ linear.weight[part].double().T + linear.bias[part].double()
        check(stacked[:, part], due, torch.float32)


def test_linear_without_parts_has_one_part() -> None:
    assert Linear(8, 5).tensors.slices == {"": slice(0, 5)}
    assert Linear(8, 5).bias is None


@packing
@dtypes
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_lm_head_plain_and_packed_match_fp64(tied: bool, dtype: torch.dtype) -> None:
    embedding = fill(TokenEmbedding(97, 48), dtype)
    head = fill(LMHead(97, 48, tied_to=embedding if tied else None), dtype, seed=1)
    weight = embedding.weight if tied else head.weight
    assert [name for name, _ in head.named_parameters()] == ([] if tied else ["weight"])
    hidden = rows(5, 48, dtype)
    due = hidden.double() @ weight.double().T
    plain = head(hidden)
    assert plain.dtype == torch.float32
    check(plain, due, dtype)
    if onednn_has_matmul(CPU, dtype):
        head.prepack()
        packed = head(hidden)
        assert packed.dtype == torch.float32
        check(packed, due, dtype)
        assert not list(head.parameters())
    assert torch.equal(embedding(torch.tensor([3, 96])), embedding.weight[[3, 96]])


@packing
def test_packed_weight_is_independent_of_original() -> None:
    weight = torch.ones(4, 8)
    packed = PackedWeight(weight)
    weight.zero_()
    assert torch.equal(packed(torch.ones(2, 8)), torch.full((2, 4), 8.0))
