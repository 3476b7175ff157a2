"""/embed of text-embeddings-inference: its lists, truncation, prompts and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.server.conftest import BOS
from tests.support.fake_encoder import FakeEncoder, vector
from tests.support.rig import Served, serving
from tests.support.sentence_folder import sentence_folder

LONGEST = 512
A, B = 64, 65  # the ids of the letters a and b


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


async def embed(served: Served, **body: Any) -> httpx2.Response:
    served.engine.texts.clear()
    return await served.http.post("/embed", json=body)


def sent(served: Served) -> list[list[int]]:
    return [text.tokens for text in served.engine.texts]


def unit(tokens: list[int]) -> Any:
    found = vector(tokens)
    return pytest.approx((found / np.linalg.norm(found)).tolist(), abs=1e-6)


async def test_embed_returns_a_list_of_vectors_of_length_one(encoder: Served) -> None:
    assert (await embed(encoder, inputs="ab")).json() == [unit([BOS, A, B])]
    several = (await embed(encoder, inputs=["a", "b"])).json()
    assert several == [unit([BOS, A]), unit([BOS, B])]
    for ids in ([A, B], [[A, B]]):
        assert (await embed(encoder, inputs=ids)).json() == [unit([A, B])]


async def test_embed_without_normalize_returns_the_vectors_of_the_model(
    model: Path, tmp_path: Path
) -> None:
    pooling = {"pooling_mode": "mean", "embedding_dimension": 4}
    folder = sentence_folder(model, tmp_path / "folder", pooling, "Normalize")
    async with serving(FakeEncoder(lambda request: []), folder) as served:
        raw = await embed(served, inputs="a", normalize=False)
        assert raw.json() == [vector([BOS, A]).tolist()]
        assert (await embed(served, inputs="a")).json() == [unit([BOS, A])]


async def test_embed_cuts_a_text_only_with_truncate(encoder: Served) -> None:
    text = "a" * 600 + "b"
    for fields in ({}, {"truncate": False}, {"truncate": None}):
        refused = await embed(encoder, inputs=["b", text], **fields)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "inputs.1")
        assert f"{LONGEST} tokens" in error["message"]
        assert "602" in error["message"]
    for side in (None, "right", "Right"):
        await embed(encoder, inputs=["b", text], truncate=True, truncation_direction=side)
        assert sent(encoder) == [[BOS, B], [BOS, *[A] * (LONGEST - 1)]]
    for side in ("left", "Left"):
        await embed(encoder, inputs=text, truncate=True, truncation_direction=side)
        assert sent(encoder) == [[BOS, *[A] * (LONGEST - 2), B]]


async def test_embed_prompt_name_chooses_a_prompt_of_the_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    folder = sentence_folder(model, tmp_path / "folder", {"pooling_mode": "mean"})
    settings = {"prompts": {"ask": "b", "tell": "bb"}, "default_prompt_name": "tell"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    async with serving(FakeEncoder(lambda request: []), folder) as served:
        await embed(served, inputs="a", prompt_name="ask")
        assert sent(served) == [[BOS, B, A]]
        await embed(served, inputs="a")
        assert sent(served) == [[BOS, B, B, A]], "the default prompt, as in /v1/embeddings"
        error = (await embed(served, inputs="a", prompt_name="other")).json()["error"]
        assert error["param"] == "prompt_name"
        assert "ask, tell" in error["message"]


async def test_embed_dimensions_keep_the_first_numbers(model: Path) -> None:
    async with serving(FakeEncoder(lambda r: []), model, allow_dimensions=True) as served:
        [found] = (await embed(served, inputs="a", dimensions=2)).json()
    first = vector([BOS, A])[:2]
    assert found == pytest.approx((first / np.linalg.norm(first)).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", ""]}, "inputs.1"),
        ({"inputs": [[A]], "prompt_name": "query"}, "prompt_name"),
        ({"inputs": "a", "truncate": "END"}, "truncate"),
        ({"inputs": "a", "truncation_direction": "middle"}, "truncation_direction"),
        ({"inputs": "a", "normalize": 1}, "normalize"),
        ({"inputs": "a", "dimensions": 3}, "dimensions"),
        ({"inputs": "a", "model": "other"}, "model"),
    ],
)
async def test_embed_refuses_a_field_by_its_name(
    encoder: Served, body: dict[str, Any], param: str
) -> None:
    response = await embed(encoder, **body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


async def test_embed_names_unknown_fields_in_a_header(encoder: Served) -> None:
    response = await embed(encoder, inputs="a", wait=True)
    assert response.headers["x-ignored-params"] == "wait"


async def test_embed_without_the_path_is_refused_with_it(encoder: Served) -> None:
    """A URL of huggingface_hub needs the path. Without it, no key protects the page there."""
    response = await encoder.http.post("/", json={"inputs": "a"})
    assert response.status_code == 405
    assert "/embed" in response.json()["error"]["message"]
