"""The step model: least squares with coefficients >= 0, and stalls that do not disturb it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

from server.glassbox.requests.step_log import Recorder
from server.glassbox.requests.step_model import fit, nnls
from tests.support.scripted_steps import CONSTANT, DECODE, PREFILL, ScriptedSteps


@pytest.mark.parametrize("seed", range(40))
def test_nnls_equals_scipys(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(5, 60))
    features = draw.exponential(size=(rows, 4)) * [1.0, 100.0, 1.0, 1e4]
    wanted = draw.normal(size=4) * [1.0, 0.01, 1.0, 1e-4]
    target = features @ wanted + draw.normal(size=rows)
    expected, residual = scipy.optimize.nnls(features, target)
    found = nnls(features, target)
    assert (found >= 0).all()
    assert np.linalg.norm(features @ found - target) == pytest.approx(residual, rel=1e-9)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


def test_nnls_with_equal_columns_gives_all_to_the_first() -> None:
    features = np.ones((9, 2))
    assert nnls(features, np.full(9, 3.0)).tolist() == pytest.approx([3.0, 0.0])


def test_nnls_with_fewer_rows_than_columns_fits_them() -> None:
    features = np.array([[1.0, 5.0, 0.0, 15.0]])
    assert features @ nnls(features, np.array([2.0])) == pytest.approx(2.0)


def test_fit_without_steps_has_no_r2() -> None:
    assert fit([]).r2 is None


def steps_with(stall: float, every: int) -> Recorder:
    recorder = Recorder([])
    engine = ScriptedSteps(recorder._listeners)
    with recorder.lease():
        for job_id in range(1, 5):
            engine.submit(job_id, 30 * job_id)
            engine.step({job_id: 30 * job_id}, tuple(range(1, job_id)))
        for turn in range(80):
            late = stall if turn % every == every - 1 else 0.0
            engine.step({}, tuple(range(1, 2 + turn % 4)), stall=late)
    return recorder


def test_fit_leaves_rare_stalls_out() -> None:
    model = fit(steps_with(2.0, 40).steps_for_fit())
    assert model.num_stalls == 2
    assert model.constant == pytest.approx(CONSTANT, rel=1e-3)
    assert model.prefill == pytest.approx(PREFILL, rel=1e-2)
    assert model.decode == pytest.approx(DECODE, rel=1e-2)
    assert model.r2 == pytest.approx(1.0, abs=1e-6)


def test_fit_of_steps_with_frequent_stalls_is_rough() -> None:
    model = fit(steps_with(2.0, 3).steps_for_fit())
    assert model.r2 is not None
    assert model.r2 < 0.8
