"""Other names of fields: /rerank of text-embeddings-inference, /score of vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_encoder import FakeEncoder
from tests.support.rig import Served, serving

TEXTS = ["ab", "x", "abab"]


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


async def test_rerank_with_texts_returns_a_list(encoder: Served) -> None:
    fields = {"query": "ab", "documents": TEXTS, "return_documents": True}
    wanted = (await encoder.http.post("/rerank", json=fields)).json()["results"]
    fields = {"query": "ab", "texts": TEXTS, "return_text": True}
    found = (await encoder.http.post("/rerank", json=fields)).json()
    assert found == [
        {
            "index": entry["index"],
            "score": entry["relevance_score"],
            "text": entry["document"]["text"],
        }
        for entry in wanted
    ]
    few = (
        await encoder.http.post("/rerank", json={"query": "ab", "texts": TEXTS, "top_n": 1})
    ).json()
    assert few == [{"index": 0, "score": pytest.approx(1.0)}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": ["a"], "texts": ["a"]}, "documents"),
        ({"query": "a", "texts": []}, "texts"),
        ({"query": "a", "texts": ["a"], "raw_scores": True}, "raw_scores"),
        ({"query": "a", "texts": ["a"], "truncate": "END"}, "truncate"),
        ({"query": "a", "documents": [{"text": "a"}], "rank_fields": ["text"]}, "rank_fields"),
        ({"query": "a", "texts": ["a"], "truncation_direction": "up"}, "truncation_direction"),
        ({"query": "a", "texts": ["a" * 600], "truncate": False}, "texts"),
        ({"query": "a" * 600, "texts": ["a"]}, "query"),
        ({"query": "a", "texts": ["a" * 600]}, "texts"),
    ],
)
async def test_rerank_refuses_what_it_cannot_do(
    encoder: Served, fields: dict[str, Any], param: str
) -> None:
    response = await encoder.http.post("/rerank", json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"truncate": True}, "a"),
        ({"truncate": True, "truncation_direction": "Right"}, "a"),
        ({"truncate": True, "truncation_direction": "Left"}, "b"),
        ({"truncate": True, "truncation_direction": "left"}, "b"),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, "b"),
    ],
)
@pytest.mark.parametrize("name", ["texts", "documents"])
async def test_rerank_with_truncate_cuts_a_text_on_the_side(
    encoder: Served, name: str, fields: dict[str, Any], end: str
) -> None:
    body = {"query": "x", name: ["a" * 600 + "b", "y"], **fields}
    response = await encoder.http.post("/rerank", json=body)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    longest = max((text.tokens for text in encoder.engine.texts), key=len)
    assert (len(longest), longest[-1]) == (512, ord(end) - 33)


async def test_rerank_max_tokens_per_doc_cuts_documents_alone(encoder: Served) -> None:
    body = {"query": "abde", "documents": ["abde", "ab"], "max_tokens_per_doc": 3}
    response = await encoder.http.post("/rerank", json=body)
    assert response.status_code == 200, response.text
    lengths = [len(text.tokens) for text in encoder.engine.texts]
    assert lengths == [5, 4, 3], "with the start token"


async def test_rerank_truncate_leaves_a_smaller_limit_as_it_is(encoder: Served) -> None:
    body = {"query": "x", "texts": ["a" * 600], "truncate": True, "truncate_prompt_tokens": 5}
    assert (await encoder.http.post("/rerank", json=body)).status_code == 200
    assert max(len(text.tokens) for text in encoder.engine.texts) == 5


@pytest.mark.parametrize(
    ("one", "other"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
async def test_score_takes_the_names_of_vllm(encoder: Served, one: str, other: str) -> None:
    body = (await encoder.http.post("/score", json={one: "ab", other: ["ab", "x"]})).json()
    same, different = [entry["score"] for entry in body["data"]]
    assert same == pytest.approx(1.0)
    assert different < 0.999
