"""/v2/embed and /v1/embed of Cohere's API: forms of vectors, truncation, refusals."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from tests.server.conftest import BOS
from tests.support import fake_encoder
from tests.support.fake_encoder import ENCODER, FakeEncoder, vector
from tests.support.rig import Served, serving


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


async def embed(served: Served, **body: Any) -> httpx2.Response:
    return await served.http.post("/v2/embed", json=body)


async def test_embed_returns_floats_texts_and_billed_tokens(encoder: Served) -> None:
    body = (await embed(encoder, model="tiny", texts=["a", "ab"])).json()
    expected = [vector([BOS, 64]).tolist(), vector([BOS, 64, 65]).tolist()]
    assert body["embeddings"] == {"float": expected}
    assert body["texts"] == ["a", "ab"]
    assert body["response_type"] == "embeddings_by_type"
    assert body["id"]
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": 5, "image_tokens": 0},
    }


async def test_embed_of_the_first_api_has_a_list_without_embedding_types(
    encoder: Served,
) -> None:
    vectors = [vector([BOS, 64]).tolist(), vector([BOS, 64, 65]).tolist()]
    typed = {"float": vectors}
    for types, shape, kind in (
        (None, vectors, "embeddings_floats"),
        (["float"], typed, "embeddings_by_type"),
    ):
        body = {"model": "tiny", "texts": ["a", "ab"], "embedding_types": types}
        found = (await encoder.http.post("/v1/embed", json=body)).json()
        assert found["embeddings"] == shape
        assert found["response_type"] == kind
        assert found["texts"] == ["a", "ab"]
        assert found["meta"]["api_version"] == {"version": "1"}
        assert found["meta"]["billed_units"]["input_tokens"] == 5
        second = (await embed(encoder, **body)).json()
        assert (second["embeddings"], second["response_type"]) == (typed, "embeddings_by_type")


async def test_embed_inputs_are_texts_in_parts(encoder: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await embed(encoder, inputs=[{"content": parts}])
    assert [text.tokens for text in encoder.engine.texts] == [[BOS, 64, 65]]


async def test_embed_base64_holds_the_floats(encoder: Served) -> None:
    forms = ["float", "base64"]
    found = (await embed(encoder, texts=["ab"], embedding_types=forms)).json()["embeddings"]
    assert found.keys() == set(forms)
    decoded = np.frombuffer(base64.b64decode(found["base64"][0]), "<f4")
    assert decoded.tolist() == found["float"][0]


async def test_embed_output_dimension_keeps_the_first_numbers(model: Path) -> None:
    async with serving(FakeEncoder(lambda r: []), model, allow_dimensions=True) as served:
        found = [await embed(served, texts=["ab"], output_dimension=size) for size in (4, 2)]
        whole, few = [answer.json()["embeddings"]["float"][0] for answer in found]
    assert few == whole[:2]


async def test_embed_codes_are_of_the_largest_number_of_each_vector(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = {64: [-0.5, 0.25, 0.001, 0.5], 65: [0.0, 0.0, 0.0, 0.0]}
    monkeypatch.setattr(fake_encoder, "vector", lambda ids: np.array(vectors[ids[-1]], "<f4"))
    async with serving(FakeEncoder(lambda r: []), model) as served:
        answer = await embed(served, texts=["a", "b"], embedding_types=["int8", "uint8"])
    codes = [[-127, 64, 0, 127], [0, 0, 0, 0]]
    unsigned = [[code + 128 for code in row] for row in codes]
    assert answer.json()["embeddings"] == {"int8": codes, "uint8": unsigned}


async def test_embed_binary_packs_the_signs_of_eight_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs = [1, 1, -1, -1, -1, -1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1]
    monkeypatch.setattr(fake_encoder, "vector", lambda tokens: np.array(signs, "<f4"))
    info = msgspec.structs.replace(ENCODER, embedding_size=16)
    forms = ["binary", "ubinary"]
    fake = FakeEncoder(lambda request: [], info=info)
    async with serving(fake, model, allow_dimensions=True) as sized:
        found = (await embed(sized, texts=["a"], embedding_types=forms)).json()["embeddings"]
        assert found == {"ubinary": [[0b11000001, 0b10]], "binary": [[193 - 128, 2 - 128]]}
        refused = await embed(sized, texts=["a"], embedding_types=forms, output_dimension=12)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "embedding_types"


async def test_embed_too_long_text_is_cut_where_the_request_says(encoder: Served) -> None:
    text = "a" * 600 + "b" * 600
    assert (await embed(encoder, texts=[text])).status_code == 200
    assert (await embed(encoder, texts=[text], truncate="START", max_tokens=4)).status_code == 200
    assert (await embed(encoder, texts=[text], truncate="END", max_tokens=4)).status_code == 200
    first, second, third = [request.tokens for request in encoder.engine.texts]
    assert first == [BOS, *[64] * 511]
    assert second == [BOS, 65, 65, 65]
    assert third == [BOS, 64, 64, 64]
    refused = await embed(encoder, texts=[text], truncate="NONE")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "texts")
    refused = await embed(encoder, texts=["a" * 9], truncate="NONE", max_tokens=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "texts")


async def test_embed_purpose_without_effect_is_listed(encoder: Served) -> None:
    response = await embed(encoder, texts=["a"], input_type="search_query")
    assert response.headers["x-ignored-params"] == "input_type"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "input_type": "odd"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types.0"),
        ({"texts": ["a"], "output_dimension": 5}, "output_dimension"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "max_tokens": 1}, "max_tokens"),
        ({"images": ["x"]}, "images"),
        ({"texts": ["a"], "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ],
)
async def test_embed_refuses_what_it_cannot_do(
    encoder: Served, fields: dict[str, Any], param: str
) -> None:
    response = await embed(encoder, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_embed_of_a_decoder_is_refused(served: Served) -> None:
    response = await embed(served, texts=["a"])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_model")
