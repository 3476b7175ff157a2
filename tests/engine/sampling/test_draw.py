"""Static draws, as a captured step needs them: they never synchronise with the host."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from engine.sampling import sampler
from engine.sampling.sampler import INVALID, DrawParams
from tests.engine.sampling.test_sampler import VARIED
from tests.support.sampling import logits_of, params_of, row, sample_rows

pytestmark = pytest.mark.usefixtures("one_thread")

draw = partial(sampler.draw, static=True)
PLAIN = VARIED[:-1]  # the last one depends on earlier tokens


@pytest.mark.parametrize("vocabulary", [1, 7, 300, 5000])
def test_draw_mixed_rows_matches_the_sampler(vocabulary: int) -> None:
    """All kinds of settings in one batch, each with several rows."""
    count = 5 * len(PLAIN)
    logits = torch.stack([logits_of(vocabulary, 1.0, seed) for seed in range(count)])
    rows = [row(3 + n % 5, seed=n * 2**33 - n, **PLAIN[n % len(PLAIN)]) for n in range(count)]
    before = logits.clone()
    drawn = draw(logits, params_of(rows))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == sample_rows(logits.clone(), rows)[0].tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_draw_greedy_with_ties_takes_the_first(setting: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    drawn = draw(logits, params_of([row(seed=s, **setting) for s in range(2)]))
    if "min_p" in setting:  # keeps all ties
        assert drawn[0] in (1, 3)
    else:
        assert drawn.tolist() == [1, 0]


def test_draw_top_k_with_ties_keeps_k_tokens() -> None:
    rows = [row(seed=s, top_k=3) for s in range(500)]
    drawn = draw(torch.zeros(500, 9), params_of(rows))
    assert set(drawn.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
def test_draw_nonfinite_row_leaves_other_rows_unchanged(broken: float) -> None:
    logits = torch.stack([logits_of(500, 1.0, seed) for seed in range(len(PLAIN))])
    params = params_of([row(seed=n, **setting) for n, setting in enumerate(PLAIN)])
    healthy = draw(logits, params).tolist()
    for victim in range(len(PLAIN)):
        poisoned = logits.clone()
        if broken == -math.inf:
            poisoned[victim] = broken
        else:
            poisoned[victim, 77] = broken
        due = [*healthy[:victim], INVALID, *healthy[victim + 1 :]]
        assert draw(poisoned, params).tolist() == due


def test_draw_on_meta_device_reads_no_value() -> None:
    """The meta device has no values, so an operation that read one would fail."""
    params = params_of([row(seed=n, **setting) for n, setting in enumerate(PLAIN)])
    on_meta = DrawParams(*(column.to("meta") for column in params))
    drawn = draw(torch.empty(len(PLAIN), 100, device="meta"), on_meta)
    assert drawn.shape == (len(PLAIN),)
