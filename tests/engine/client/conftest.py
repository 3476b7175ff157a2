"""Fixture: the client that most tests of ProcessClient use."""

from __future__ import annotations

import pytest

from tests.support.client_rig import Client


@pytest.fixture
async def client() -> Client:
    return Client(max_num_queued_reqs=3, max_num_queued_tokens=100)
