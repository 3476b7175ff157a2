"""Tables of positions: shapes while a model is planned, numbers when it is loaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.layers.embedding import Sinusoids
from engine.layers.position_tables import PositionTables, fill_tables
from engine.layers.rotary import PairRotaryEmbedding, RopeScaling, RotaryEmbedding

Make = Callable[[int], PositionTables]
LAYERS: dict[str, Make] = {
    "rotary": lambda n: RotaryEmbedding(8, 1e4, RopeScaling(), n, torch.bfloat16),
    "pairs": lambda n: PairRotaryEmbedding(6, 1e4, n, torch.float32),
    "sinusoids, odd width": lambda n: Sinusoids(n, 7, torch.float32),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_tables_planned_and_filled_equal_those_made_at_once(make: Make) -> None:
    made = make(40)
    with torch.device("meta"):
        planned = make(40)
    wanted = dict(made.named_buffers())
    shapes = {name: (t.shape, t.dtype, t.is_meta) for name, t in planned.named_buffers()}
    assert shapes == {name: (t.shape, t.dtype, True) for name, t in wanted.items()}
    fill_tables(torch.nn.Sequential(planned))
    for name, table in planned.named_buffers():
        assert torch.equal(table, wanted[name]), name


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_planning_tables_of_very_many_positions_takes_no_memory(make: Make) -> None:
    with torch.device("meta"):  # 2**40 rows would take terabytes
        planned = make(2**40)
    assert all(2**40 in table.shape for table in planned.buffers())
