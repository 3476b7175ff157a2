"""The client most tests of ProcessClient begin with."""

from __future__ import annotations

import pytest

from tests.unit.client_rig import Client


@pytest.fixture
async def client() -> Client:
    return Client(max_num_queued_reqs=3, max_num_queued_tokens=100)
