"""The experts' kernel on a GPU equals torch, in each dtype and with each tile."""

from __future__ import annotations

import pytest
import torch

from engine.ops.experts import experts_linear, route, rows_by_expert
from tests.support.tolerances import check

pytestmark = pytest.mark.gpu


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_experts_kernel_equals_torch(cuda: str, tokens: int, dtype: torch.dtype) -> None:
    experts, inputs, outputs = 9, 360, 200
    weight = (draw(experts, outputs, inputs) / inputs**0.5).to(cuda, dtype)
    bias = draw(experts, outputs, seed=1).to(cuda, dtype)
    chosen, _ = route(draw(tokens, experts, seed=2).to(cuda), 2, renormalises=True)
    rows = rows_by_expert(chosen, experts)
    x = draw(tokens, inputs, seed=3).to(cuda, dtype)[rows.tokens]
    due = experts_linear(x.double(), weight.double(), bias.double(), rows, kernels="torch")
    check(experts_linear(x, weight, bias, rows, kernels="triton"), due.to(dtype))
