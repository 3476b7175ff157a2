"""The `golden` fixture: one reference model and checkpoint per case."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.models.golden", "tests.models.forward")

from tests.models.golden import Golden  # noqa: E402 - after asking for its asserts to be rewritten


@pytest.fixture(scope="module")
def golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Golden:
    pytest.importorskip("transformers")
    return Golden(request.param, tmp_path_factory.mktemp(request.param.name))
