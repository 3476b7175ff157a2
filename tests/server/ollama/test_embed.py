"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.server.conftest import BOS
from tests.server.ollama.conftest import ask
from tests.server.ollama.shapes import EMBED, EMBEDDINGS, check_shape
from tests.support.fake_encoder import FakeEncoder, vector
from tests.support.rig import Served, serving

A, B = 64, 65  # the ids of the letters a and b
NULLS = dict.fromkeys(("mirostat", "num_ctx", "num_gpu", "temperature", "stop"))


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


async def test_embed_returns_vectors_of_length_one(encoder: Served) -> None:
    answer = (await ask(encoder, "/api/embed", input=["a", "b"], options=NULLS)).json()
    check_shape(answer, EMBED)
    expected = [vector([BOS, letter]) for letter in (A, B)]
    units = [each / np.linalg.norm(each) for each in expected]
    assert answer["embeddings"] == [pytest.approx(unit.tolist(), abs=1e-6) for unit in units]
    assert (answer["model"], answer["prompt_eval_count"]) == ("tiny", 4)
    one = (await ask(encoder, "/api/embed", input="a", model="tiny:latest")).json()
    assert one["embeddings"] == answer["embeddings"][:1]
    for empty in ("", []):
        assert (await ask(encoder, "/api/embed", input=empty)).json()["embeddings"] == []


async def test_embeddings_return_the_vector_of_the_checkpoint(encoder: Served) -> None:
    answer = (await ask(encoder, "/api/embeddings", prompt="a")).json()
    check_shape(answer, EMBEDDINGS)
    assert answer["embedding"] == vector([BOS, A]).tolist()
    assert (await ask(encoder, "/api/embeddings")).json() == {"embedding": []}


async def test_long_text_is_refused_unless_truncate_is_true(encoder: Served) -> None:
    long = "a" * 600
    for fields in ({}, {"truncate": False}):
        response = await ask(encoder, "/api/embed", input=long, **fields)
        assert response.status_code == 400
        assert "512 tokens" in response.json()["error"]
    assert (await ask(encoder, "/api/embeddings", prompt=long)).status_code == 400
    cut = (await ask(encoder, "/api/embed", input=long, truncate=True)).json()
    assert cut["prompt_eval_count"] == 512


async def test_model_that_generates_makes_no_vectors(served: Served) -> None:
    response = await ask(served, "/api/embed", input="a")
    assert response.status_code == 400
    assert "generates text" in response.json()["error"]
