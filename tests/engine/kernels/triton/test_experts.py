"""The experts' linear kernel against torch, expert by expert."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton import experts as kernel
from engine.ops.experts import ExpertRows, experts_linear, rows_by_expert
from tests.support.tolerances import TOLERANCE

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
TILES = {"few": kernel.FEW, "many": kernel.MANY, "fp32": kernel.FP32}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def routed(tokens: int, experts: int, most: int, per_token: int = 2) -> ExpertRows:
    """Rows of tokens whose experts are drawn from the first `most`."""
    scores = draw(tokens, most, seed=3).float()
    return rows_by_expert(scores.argsort(-1)[:, :per_token], experts)


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows) -> None:
    due = experts_linear(x.double(), weight.double(), None, rows, kernels="torch")
    rtol, atol = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), due, rtol=rtol, atol=atol)


@pytest.mark.variants(5)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("experts", "most"), [(5, 5), (5, 2), (9, 9), (8, 4)])
def test_experts_kernel_equals_torch(experts: int, most: int, tile: str) -> None:
    """Outputs and inputs do not fill their last block; some experts have no rows."""
    dtype = torch.float32 if tile == "fp32" else torch.bfloat16
    weight = draw(experts, 70, 136, seed=1, dtype=dtype)
    for tokens in (1, 3, 70):
        rows = routed(tokens, experts, most)
        x = draw(2 * tokens, 136, seed=2, dtype=dtype)
        check(kernel.multiply_experts(x, weight, None, rows.starts, TILES[tile]), x, weight, rows)


def test_one_expert_may_have_all_rows() -> None:
    weight, x = draw(4, 40, 32, seed=1), draw(50, 32, seed=2)
    for expert in (0, 3):
        rows = rows_by_expert(torch.full((50, 1), expert), 4)
        check(experts_linear(x, weight, None, rows, kernels="triton"), x, weight, rows)


def test_rows_select_the_tile() -> None:
    """Both are right, as chosen by the number of rows, and for rows with a stride."""
    weight, wide = draw(3, 40, 32, seed=1), draw(96, 64, seed=2)
    for tokens in (10, 48):
        rows = routed(tokens, 3, 3)
        x = wide[: 2 * tokens, 32:]
        check(experts_linear(x, weight, None, rows, kernels="triton"), x, weight, rows)
    assert len(experts_linear(wide[:0, :32], weight, None, rows, kernels="triton")) == 0


def test_bits_of_a_row_do_not_depend_on_other_rows() -> None:
    weight, x = draw(3, 40, 200, seed=1), draw(12, 200, seed=2)
    chosen = torch.tensor([[0], [1], [1], [2]]).repeat(3, 1)
    rows = rows_by_expert(chosen, 3)
    due = experts_linear(x[rows.tokens], weight, None, rows, kernels="triton")
    for place, token in enumerate(rows.tokens.tolist()):
        alone = rows_by_expert(chosen[token : token + 1], 3)
        found = experts_linear(x[token : token + 1], weight, None, alone, kernels="triton")
        assert torch.equal(found[0], due[place])
