"""/embedding of llama.cpp's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import BOS
from tests.support.fake_encoder import FakeEncoder, vector
from tests.support.rig import Served, serving

A, B = [BOS, 64], [BOS, 65]


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize("name", ["input", "content"])
async def test_embedding_returns_a_list_of_normalised_vectors(
    encoder: Served, path: str, name: str
) -> None:
    body = (await encoder.http.post(path, json={name: ["a", "b"]})).json()
    assert [entry["index"] for entry in body] == [0, 1]
    for entry, tokens in zip(body, (A, B), strict=True):
        wanted = vector(tokens) / np.linalg.norm(vector(tokens))
        [found] = entry["embedding"]
        assert found == pytest.approx(wanted.tolist(), abs=1e-6)


async def test_embedding_minus_one_leaves_vectors_as_computed(encoder: Served) -> None:
    fields = {"content": "a", "embd_normalize": -1}
    [entry] = (await encoder.http.post("/embedding", json=fields)).json()
    assert entry["embedding"] == [vector(A).tolist()]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "a", "content": "a"}, "input"),
        ({"input": "a", "embd_normalize": 1}, "embd_normalize"),
    ],
)
async def test_embedding_refuses_what_it_cannot_do(
    encoder: Served, fields: dict[str, Any], param: str
) -> None:
    response = await encoder.http.post("/embedding", json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
