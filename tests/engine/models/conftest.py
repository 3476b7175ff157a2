"""The `golden` and `encoder` fixtures: one reference model and checkpoint per case."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.support.encoders import Encoder, EncoderCase
from tests.support.golden import Case, Golden


# A module-scoped fixture whose parameter is combined with a parameter of the test is rebuilt for
# every test. So this fixture returns a function that builds each case once.
@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Callable[[Case], Golden]:
    pytest.importorskip("transformers")
    return cache(lambda case: Golden(case, tmp_path_factory.mktemp(case.name)))


@pytest.fixture
def golden(request: pytest.FixtureRequest, goldens: Callable[[Case], Golden]) -> Golden:
    return goldens(request.param)


@pytest.fixture(scope="module")
def encoders(
    tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Callable[[EncoderCase], Encoder]:
    pytest.importorskip("transformers")
    return cache(lambda case: Encoder(case, tmp_path_factory.mktemp(case.name)))


@pytest.fixture
def encoder(request: pytest.FixtureRequest, encoders: Callable[[EncoderCase], Encoder]) -> Encoder:
    return encoders(request.param)
