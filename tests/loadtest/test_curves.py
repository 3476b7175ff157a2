"""The cost curves: a law is fitted to the medians, and a curve that leaves it is seen."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from loadtest.bench_cpu import counts
from loadtest.curves import Curve, affine, constant, over_queue, saturating, with_slope
from loadtest.random_model import LLAMA_125M

X = np.array([1.0, 2.0, 8.0, 64.0])


@pytest.mark.parametrize(
    ("law", "values"),
    [
        (affine, 3 + 0.5 * X),
        (saturating, X / (3 + 0.5 * X)),
        (constant, np.full(4, 7.0)),
        (with_slope(0.25), 100 + 0.25 * X),
    ],
)
def test_law_reproduces_values_that_follow_it(law, values):
    assert law(X, values) == pytest.approx(values)


def test_worst_is_the_largest_difference_between_a_median_and_the_law():
    points = {1: [9.0, 10.0, 30.0], 2: [10.0], 3: [10.0], 4: [15.0]}
    curve = Curve.fitted("Gap", "ms", "streams", points, "the same", constant)
    assert curve.medians == [10.0, 10.0, 10.0, 15.0]
    assert curve.worst == pytest.approx(0.5)
    assert "±50%" in str(curve)


def test_curve_is_drawn_and_written():
    points = {1: [2.0], 10: [3.0]}
    curve = Curve.fitted("Gap", "ms", "streams", points, "a + b n", affine)
    drawn = curve.chart()
    assert "measured" in drawn
    assert "a + b n" in drawn
    assert json.loads(json.dumps(asdict(curve)))["points"] == {"1": [2.0], "10": [3.0]}


def test_counts_are_those_of_the_checkpoint():
    body, head, kv = counts(LLAMA_125M)
    assert head == 576 * 32000
    assert kv == 2 * 30 * 3 * 64
    assert body == 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)


def test_scheduler_curve_has_a_value_for_each_queue(monkeypatch):
    monkeypatch.setattr("loadtest.curves.QUEUES", (1, 30))
    monkeypatch.setattr("loadtest.curves.STEPS", 6)
    monkeypatch.setattr("loadtest.curves.SETTLE", 3)
    [curve] = over_queue()
    assert {waiting: len(values) for waiting, values in curve.points.items()} == {1: 6, 30: 6}
    assert min(curve.medians) > 0
