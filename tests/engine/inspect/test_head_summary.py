"""Summaries of heads against the same figures by hand, whole and in parts."""

from __future__ import annotations

import math

import pytest
import torch

from engine.attention.spec import AttentionSpec
from engine.inspect.head_summary import SummaryBuilder
from engine.protocol.lens import HeadSummaries

HEADS = 3
TOKENS = [4, 7, 7, 9, 4, 7, 1, 9, 4, 2] * 5  # with repetitions, also at once


def random_weights(length: int, window: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    weights = torch.rand(HEADS, length, length, generator=generator) ** 6
    back = torch.arange(length)[:, None] - torch.arange(length)
    weights[:, (back < 0) | (back >= (window or length))] = 0
    return weights / weights.sum(-1, keepdim=True)


def summary(weights: torch.Tensor, size: int, window: int | None = None) -> HeadSummaries:
    spec = AttentionSpec(HEADS, HEADS, 8, scale=1.0, window=window)
    length = weights.shape[1]
    builder = SummaryBuilder(spec, length, torch.tensor(TOKENS[:length]))
    for first in range(0, length, size):
        builder.add(first, weights[:, first : first + size])
    return builder.summary()


@pytest.mark.parametrize("size", [50, 7, 1])
@pytest.mark.parametrize(("length", "window"), [(50, None), (50, 6), (20, None), (2, None)])
def test_summary_equals_that_by_hand(length: int, window: int | None, size: int) -> None:
    weights = random_weights(length, window)
    found = summary(weights, size, window)
    parts = min(length, 32)
    assert (found.thumb_rows, found.thumb_columns) == (parts, parts)
    thumbs = torch.frombuffer(bytearray(found.thumbs), dtype=torch.uint8)
    for head, whole in enumerate(weights):
        rows = [slice(n * length // parts, (n + 1) * length // parts) for n in range(parts)]
        largest = torch.stack([torch.stack([whole[r, c].max() for c in rows]) for r in rows])
        assert torch.equal(
            thumbs.view(HEADS, parts, parts)[head], (255 * largest.sqrt()).round().byte()
        )
        later = range(1, length)
        flat = [
            -sum(float(w) * math.log(float(w)) for w in whole[i] if w)
            / math.log(min(i + 1, window or length))
            for i in later
        ]
        assert found.flatness[head] == pytest.approx(sum(flat) / len(flat), abs=1e-5)
        previous = [float(whole[i, i - 1]) for i in later]
        assert found.previous[head] == pytest.approx(sum(previous) / len(previous), abs=1e-6)
        first = [float(whole[i, 0]) for i in later]
        assert found.first[head] == pytest.approx(sum(first) / len(first), abs=1e-6)
        induction = []
        for i in later:
            behind = [j + 1 for j in range(i - 1) if TOKENS[j] == TOKENS[i]]
            if behind:
                induction.append(float(whole[i, behind].sum()))
        expected = sum(induction) / len(induction) if induction else None
        actual = found.induction[head] if found.induction else None
        assert actual == (None if expected is None else pytest.approx(expected, abs=1e-6))


@pytest.mark.parametrize("kind", ["previous", "first", "induction"])
def test_head_of_one_kind_has_the_score_1(kind: str) -> None:
    tokens = torch.tensor(list(range(20)) * 2)
    weights = torch.zeros(1, 40, 40)
    for i in range(40):
        key = {"previous": max(i - 1, 0), "first": 0, "induction": i - 19 if i > 19 else 0}[kind]
        weights[0, i, key] = 1
    builder = SummaryBuilder(AttentionSpec(1, 1, 8, scale=1.0), 40, tokens)
    builder.add(0, weights)
    found = builder.summary()
    scores = {"previous": found.previous, "first": found.first, "induction": found.induction}
    assert scores.pop(kind) == (pytest.approx(1.0),)
    assert all(score < 0.6 for (score,) in scores.values())


def test_flatness_of_a_window_to_both_sides_counts_its_keys() -> None:
    spec = AttentionSpec(HEADS, HEADS, 8, scale=1.0, kind="full", window=3)
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 3
    weights = near / near.sum(1, keepdim=True)
    builder = SummaryBuilder(spec, 9, None)
    builder.add(0, weights.expand(HEADS, 9, 9))
    assert builder.summary().flatness == (pytest.approx(1.0),) * HEADS


def test_attention_to_a_source_has_no_kinds() -> None:
    spec = AttentionSpec(HEADS, HEADS, 8, scale=1.0, kind="cross")
    builder = SummaryBuilder(spec, 5, None)
    builder.add(0, torch.full((HEADS, 3, 5), 0.2))
    found = builder.summary()
    assert (found.previous, found.first, found.induction) == ((), (), ())
    assert found.flatness == (pytest.approx(1.0),) * HEADS
