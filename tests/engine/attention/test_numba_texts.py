"""Numba's attention of whole texts, without a KV cache: every token sees later ones, too."""

from __future__ import annotations

import pytest
import torch

from engine.attention.numba import TEXT_BLOCK, NumbaBackend
from engine.attention.spec import AttentionSpec
from engine.kernels.numba.call import TILE
from tests.engine.attention.test_torch import TOLERANCE, check
from tests.support.paged import PagedRun, Sequences, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = [3, TEXT_BLOCK + 6, TEXT_BLOCK + 1, 1, TEXT_BLOCK, 2 * TEXT_BLOCK + 2, TILE + 1]
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def spec_of(window: int | None) -> AttentionSpec:
    return AttentionSpec(4, 2, 32, scale=32**-0.5, kind="full", window=window)


def attended(texts: Sequences, members: list[int], padding: int = 0) -> list[torch.Tensor]:
    """Return the results of these texts in one step, and those of the padding behind them."""
    own = [[each[i] for i in members] for each in (texts.queries, texts.keys, texts.values)]
    lengths = [len(query) for query in own[0]]
    run = PagedRun(Sequences(texts.spec, *own), 16, backend=NumbaBackend(torch.device("cpu")))
    plan = run.backend.plan(run.layout([(n, 0, length) for n, length in enumerate(lengths)]))
    rows = [torch.cat(each) for each in own]
    padded = [torch.cat([each, each.new_full((padding, *each.shape[1:]), 7)]) for each in rows]
    return list(plan.attend(texts.spec, None, *padded).split([*lengths, padding]))


@dtypes
@pytest.mark.parametrize("window", [None, 1, 20, TEXT_BLOCK, 1000])
def test_numba_texts_match_dense_and_keep_their_bits(
    dtype: torch.dtype, window: int | None
) -> None:
    texts = random_sequences(spec_of(window), LENGTHS, dtype)
    *together, padding = attended(texts, list(range(len(LENGTHS))), padding=5)
    check(texts, together)
    assert not padding.any()
    for index, found in enumerate(together):
        assert torch.equal(attended(texts, [index])[0], found)


@dtypes
def test_numba_text_with_nan_changes_no_other(dtype: torch.dtype) -> None:
    texts = random_sequences(spec_of(None), LENGTHS, dtype)
    members = list(range(len(LENGTHS)))
    due = attended(texts, members)
    for each in (texts.keys[1], texts.values[1]):
        each[-1] = float("nan")
    found = attended(texts, members)
    assert found[1].isnan().all()
    for index in members:
        assert index == 1 or torch.equal(found[index], due[index])


def test_numba_text_token_sees_its_window_on_both_sides() -> None:
    """If a value changes, so do the results of exactly those tokens that see it."""
    window, place = 5, TEXT_BLOCK + 1
    texts = random_sequences(spec_of(window), [2 * TEXT_BLOCK])
    before = attended(texts, [0])[0]
    texts.values[0][place] += 100
    changed = (attended(texts, [0])[0] != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == list(range(place - window + 1, place + window))
