"""The few-rows linear kernel against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.triton import chips
from engine.kernels.triton import linear as kernel
from engine.kernels.triton.chips import H200
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.ops import linear as op
from engine.ops.kernels import use_kernels
from engine.ops.linear import linear
from tests.support.tolerances import TOLERANCE

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias=None) -> None:
    due = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias)
    rtol, atol = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), due, rtol=rtol, atol=atol)


@pytest.mark.variants(14)
@dtypes
@pytest.mark.parametrize("rows", range(1, 17))
def test_linear_kernel_every_row_count_equals_torch(rows: int, dtype: torch.dtype) -> None:
    """Outputs and inputs do not fill their last block; inputs need several rounds."""
    inputs = 2 * kernel.TILE.inputs + 24
    x, weight = draw(rows, inputs, dtype=dtype), draw(37, inputs, dtype=dtype, seed=1)
    bias = draw(37, dtype=dtype, seed=2)
    check(linear(x, weight, kernels="triton"), x, weight)
    check(linear(x, weight, bias, kernels="triton"), x, weight, bias.double())
    check(linear(x, weight, dtype=torch.float32, kernels="triton"), x, weight)


def test_linear_kernel_bits_of_a_row_are_equal_at_every_row_count() -> None:
    x, weight = draw(16, 600, dtype=torch.bfloat16), draw(37, 600, dtype=torch.bfloat16, seed=1)
    due = linear(x, weight, dtype=torch.float32, kernels="triton")
    for rows in range(1, 16):
        found = linear(x[:rows], weight, dtype=torch.float32, kernels="triton")
        assert torch.equal(found, due[:rows])
    for row in range(16):
        found = linear(x[row : row + 1], weight, dtype=torch.float32, kernels="triton")
        assert torch.equal(found, due[row : row + 1])


@pytest.mark.parametrize("sizes", [(1, 1), (12, 3), (1000, 5)], ids=str)
def test_linear_kernel_odd_sizes_and_strides_equal_torch(sizes: tuple[int, int]) -> None:
    weight = draw(sizes[1], sizes[0], dtype=torch.bfloat16)
    wide = draw(6, 2 * sizes[0], dtype=torch.bfloat16, seed=1)
    for x in (wide[:3, : sizes[0]], wide[:1, ::2], wide[::2, sizes[0] :]):
        check(linear(x, weight, kernels="triton"), x, weight)


@pytest.mark.parametrize("rows", [17, 64, 256])
def test_linear_of_many_rows_on_cuda_is_not_rounded_before_fp32(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two logits that differ by less than a bf16 step must stay different."""
    monkeypatch.setattr(chips, "chip_of", lambda device: H200)
    with FakeTensorMode():
        x = torch.empty(rows, 24, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(7, 24, dtype=torch.bfloat16, device="cuda")
        with Operators() as called:
            found = linear(x, weight, dtype=torch.float32, kernels="triton")
    assert found.dtype == torch.float32
    assert called.names[-1] == "aten.mm.dtype"  # no cast behind the product


class Operators(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_linear_up_to_max_rows_of_16_bit_weights_uses_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More rows and fp32 weights go to torch, as does everything without Triton's kernels."""
    taken: list[int] = []
    whole = kernel.few_rows_linear

    def counted(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        taken.append(len(x))
        return whole(x, *rest, **named)

    monkeypatch.setattr(kernel, "few_rows_linear", counted)
    layer, head = Linear(24, 5, bias=True), LMHead(7, 24)
    for parameter in (*layer.parameters(), *head.parameters()):
        parameter.data = draw(*parameter.shape, dtype=torch.bfloat16)
        parameter.requires_grad_(False)
    assert op.FEW_ROWS == kernel.MAX_ROWS
    for rows in (1, op.FEW_ROWS, op.FEW_ROWS + 1):
        x = draw(rows, 24, dtype=torch.bfloat16)
        for kernels in ("torch", "numba"):
            use_kernels(layer, kernels)
            layer(x)
        use_kernels(layer, "triton")
        use_kernels(head, "triton")
        check(layer(x), x, layer.weight, layer.bias.double())
        assert head(x).dtype == torch.float32
        if rows <= op.FEW_ROWS:  # torch rounds to bf16 before it widens to fp32
            check(head(x), x, head.weight)
        linear(x.float(), layer.weight.float(), kernels="triton")
    assert taken == [1] * 3 + [op.FEW_ROWS] * 3
