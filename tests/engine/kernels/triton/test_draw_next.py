"""The kernels that draw and append the next tokens of rows, against torch and under any order."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from engine.sampling.sampler import INVALID, DrawParams, draw, draw_next
from tests.engine.sampling.test_draw import PLAIN
from tests.support.program_order import program_order
from tests.support.sampling import logits_of, params_of, row

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
ROWS, LENGTH, VOCABULARY = 9, 40, 2049
PADDING = ROWS - 1
SENTINEL = 77


class Rows(NamedTuple):
    """The arguments of `draw_next` that hold all rows."""

    params: DrawParams
    tokens: torch.Tensor
    padding: int = PADDING


def rows_of(lengths: list[int]) -> Rows:
    """Return rows with these numbers of known tokens, and all kinds of parameters."""
    rows = [row(n, seed=n * 2**33 - n, **PLAIN[n % len(PLAIN)]) for n in lengths]
    params = params_of(rows)
    params = params._replace(positions=params.positions.int())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 500, (ROWS, LENGTH + 1), generator=generator, dtype=torch.int32)
    return Rows(params, tokens)


def copy_of(columns: Rows) -> Rows:
    params = columns.params
    params = params._replace(positions=params.positions.clone())
    return columns._replace(params=params, tokens=columns.tokens.clone())


def logits_for(count: int) -> torch.Tensor:
    return torch.stack([logits_of(VOCABULARY, 1.0, seed) for seed in range(count)])


# Row 0 has two drafted tokens: what is drawn behind them is written, and not counted.
ENTRIES = [(6, 0), (0, 0), (0, 1), (0, 2), (PADDING, 0), (3, 0), (PADDING, 0)]


def test_draw_next_kernels_equal_torch() -> None:
    """Other rows do not change. The padding row changes nothing, even if it occurs twice."""
    given = rows_of([1, 2, 16, 17, 32, 33, 39, LENGTH, 1])
    row_ids, ahead = torch.tensor(ENTRIES).T.contiguous()
    logits = logits_for(len(ENTRIES))
    logits[5, 3] = math.nan
    due, found = copy_of(given), copy_of(given)
    expected = draw_next(logits, *due, row_ids, ahead, static=True)
    out = torch.full_like(row_ids, SENTINEL)
    result = draw_next(logits, *found, row_ids, ahead, "triton", out=out)
    assert result is out
    is_real = row_ids != PADDING
    assert out[is_real].tolist() == expected[is_real].tolist()
    assert out[~is_real].tolist() == [SENTINEL] * 2
    assert expected[5] == INVALID
    assert torch.equal(found.tokens[:PADDING], due.tokens[:PADDING])
    assert torch.equal(found.tokens[PADDING], given.tokens[PADDING])
    assert torch.equal(found.params.positions, due.params.positions)
    assert found.params.positions.tolist() == [2, 2, 16, 18, 32, 33, 40, LENGTH, 1]
    assert found.tokens[3, 17] == 0, "a failed draw is stored as token 0"
    assert found.tokens[0, 1:4].tolist() == expected[1:4].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_draw_next_kernels_in_any_order_have_the_same_bits(seed: int) -> None:
    """The entries of row 0 need its length from before the draw, which one of them changes."""
    given = rows_of([1, 2, 16, 17, 32, 33, 39, LENGTH, 1])
    row_ids, ahead = torch.tensor(ENTRIES).T.contiguous()
    logits = logits_for(len(ENTRIES))
    due, found = copy_of(given), copy_of(given)
    outs = [torch.full_like(row_ids, SENTINEL) for _ in range(2)]
    draw_next(logits, *due, row_ids, ahead, "triton", out=outs[0])
    with program_order(seed):
        draw_next(logits, *found, row_ids, ahead, "triton", out=outs[1])
    assert outs[1].tolist() == outs[0].tolist()
    assert torch.equal(found.tokens, due.tokens)
    assert torch.equal(found.params.positions, due.params.positions)


def test_draw_next_kernels_equal_draw_of_gathered_parameters() -> None:
    columns = rows_of(list(range(1, ROWS + 1)))
    row_ids = torch.tensor([7, 2, 5])
    params = columns.params.select(row_ids)
    logits = logits_for(3)
    due = draw(logits, params._replace(positions=params.positions.long()), "triton")
    found = draw_next(logits, *columns, row_ids, torch.zeros_like(row_ids), "triton")
    assert found.tolist() == due.tolist()


def test_draw_next_kernels_with_padding_alone_change_nothing() -> None:
    """So a step draws for no row if the host changes its logits before the draw."""
    columns = rows_of([5] * ROWS)
    before = copy_of(columns)
    row_ids = torch.full((4,), PADDING)
    out = torch.full_like(row_ids, SENTINEL)
    ahead = torch.tensor([0, 1, 2, 0])
    draw_next(torch.full((4, 50), math.nan), *columns, row_ids, ahead, "triton", out=out)
    assert out.tolist() == [SENTINEL] * 4
    assert torch.equal(columns.tokens, before.tokens)
    assert torch.equal(columns.params.positions, before.params.positions)
