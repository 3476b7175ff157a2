"""The few-rows linear kernel against torch."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton import linear as kernel
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


@dtypes
@pytest.mark.parametrize("rows", range(1, 9))
def test_linear_kernel_every_row_count_equals_torch(rows: int, dtype: torch.dtype) -> None:
    """Outputs and inputs do not fill their last block; inputs need several rounds."""
    inputs = 2 * kernel.BLOCKS[1 << (rows - 1).bit_length()][1] + 24
    x, weight = draw(rows, inputs, dtype=dtype), draw(37, inputs, dtype=dtype, seed=1)
    bias = draw(37, dtype=dtype, seed=2)
    check(linear(x, weight, kernels="triton"), x, weight)
    check(linear(x, weight, bias, kernels="triton"), x, weight, bias.double())
    check(linear(x, weight, dtype=torch.float32, kernels="triton"), x, weight)


@pytest.mark.parametrize("sizes", [(1, 1), (12, 3), (1000, 5)], ids=str)
def test_linear_kernel_odd_sizes_and_strides_equal_torch(sizes: tuple[int, int]) -> None:
    weight = draw(sizes[1], sizes[0], dtype=torch.bfloat16)
    wide = draw(6, 2 * sizes[0], dtype=torch.bfloat16, seed=1)
    for x in (wide[:3, : sizes[0]], wide[:1, ::2], wide[::2, sizes[0] :]):
        check(linear(x, weight, kernels="triton"), x, weight)


def test_linear_up_to_max_rows_of_16_bit_weights_uses_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More rows and fp32 weights go to torch, as does everything without Triton's kernels."""
    taken: list[int] = []
    whole = kernel.few_rows_linear

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        taken.append(len(x))
        return whole(x, *rest)

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
