"""Sampling by `draw`, which works on device tensors without synchronising with the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.sampling.draw import INVALID, DrawParams, draw
from engine.sampling.sampler import SamplingRow, sample
from tests.engine.sampling.test_sampler import VARIED, logits_of, row

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = VARIED[:-1]  # the last one depends on earlier tokens


def params_of(rows: list[SamplingRow]) -> DrawParams:
    params = [row.params for row in rows]
    return DrawParams(
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seeds=torch.tensor([p.seed for p in params]),
        positions=torch.tensor([row.position for row in rows]),
    )


@pytest.mark.parametrize("vocabulary", [1, 7, 300, 5000])
def test_draw_mixed_rows_matches_the_sampler(vocabulary: int) -> None:
    """All kinds of settings in one batch, each with several rows."""
    count = 5 * len(PLAIN)
    logits = torch.stack([logits_of(vocabulary, 1.0, seed) for seed in range(count)])
    rows = [row(3 + n % 5, seed=n * 2**33 - n, **PLAIN[n % len(PLAIN)]) for n in range(count)]
    before = logits.clone()
    drawn = draw(logits, params_of(rows), "torch")
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == sample(logits.clone(), rows)[0].tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_draw_greedy_with_ties_takes_the_first(setting: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    drawn = draw(logits, params_of([row(seed=s, **setting) for s in range(2)]), "torch")
    if "min_p" in setting:  # keeps all ties
        assert drawn[0] in (1, 3)
    else:
        assert drawn.tolist() == [1, 0]


def test_draw_top_k_with_ties_keeps_k_tokens() -> None:
    rows = [row(seed=s, top_k=3) for s in range(500)]
    drawn = draw(torch.zeros(500, 9), params_of(rows), "torch")
    assert set(drawn.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
def test_draw_nonfinite_row_leaves_other_rows_unchanged(broken: float) -> None:
    logits = torch.stack([logits_of(500, 1.0, seed) for seed in range(len(PLAIN))])
    params = params_of([row(seed=n, **setting) for n, setting in enumerate(PLAIN)])
    healthy = draw(logits, params, "torch").tolist()
    for victim in range(len(PLAIN)):
        poisoned = logits.clone()
        if broken == -math.inf:
            poisoned[victim] = broken
        else:
            poisoned[victim, 77] = broken
        due = [*healthy[:victim], INVALID, *healthy[victim + 1 :]]
        assert draw(poisoned, params, "torch").tolist() == due


def test_draw_on_meta_device_reads_no_value() -> None:
    """The meta device has no values, so an operation that read one would fail."""
    params = params_of([row(seed=n, **setting) for n, setting in enumerate(PLAIN)])
    on_meta = DrawParams(*(column.to("meta") for column in params))
    drawn = draw(torch.empty(len(PLAIN), 100, device="meta"), on_meta, "torch")
    assert drawn.shape == (len(PLAIN),)
