"""Prompts and sizes of vectors as a checkpoint's files have them, with a fake encoder."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import BOS
from tests.support.fake_encoder import SIZE, FakeEncoder, vector
from tests.support.rig import Served, serving
from tests.support.sentence_folder import sentence_folder

QWEN = "Instruct: Given a question, find passages\nQuery:"
PROMPTS = {"query": "q:", "document": "d:", "Clustering": "k:", "passage": "p:"}


def ids(text: str) -> list[int]:
    """Return the ids that conftest's byte tokenizer gives for ASCII letters."""
    return [BOS, *(ord(char) - 33 for char in text)]


@asynccontextmanager
async def folder_served(
    model: Path, folder: Path, *, config: Any = None, pooling: Any = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serve a folder with these settings of config_sentence_transformers.json."""
    sentence_folder(model, folder, pooling or {"pooling_mode": "mean"})
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    async with serving(FakeEncoder(lambda request: []), folder) as served:
        yield served


async def tokens(served: Served, path: str = "/v1/embeddings", **body: Any) -> list[list[int]]:
    served.engine.texts.clear()
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return [text.tokens for text in served.engine.texts]


async def refusal(served: Served, path: str = "/v1/embeddings", **body: Any) -> tuple[str, str]:
    response = await served.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


async def test_embeddings_prompt_of_a_request_precedes_each_text(
    model: Path, tmp_path: Path
) -> None:
    async with folder_served(model, tmp_path / "f", prompts=PROMPTS) as served:
        assert await tokens(served, input=["a", "b"]) == [ids("a"), ids("b")]
        named = await tokens(served, input=["a", "b"], prompt_name="query")
        assert named == [ids("q:a"), ids("q:b")]
        assert await tokens(served, input="a", prompt="x:") == [ids("x:a")]
        assert await tokens(served, "/pooling", input="a", prompt_name="passage") == [ids("p:a")]
        assert await tokens(served, "/invocations", input="a", prompt="x:") == [ids("x:a")]
        assert {text.skip for text in served.engine.texts} == {0}
        param, message = await refusal(served, input="a", prompt_name="other")
        assert param == "prompt_name"
        assert "'other'" in message
        assert "query, document, Clustering, passage" in message
        param, message = await refusal(served, input="a", instruction="Find it")
        assert (param, "'q:'" in message) == ("instruction", True)
        assert (await refusal(served, input="a", prompt="x", prompt_name="query"))[0] == (
            "prompt_name"
        )
        for given in ([1, 2], [[1], [2]], ["a", [1]]):
            param, message = await refusal(served, input=given, prompt_name="query")
            assert (param, "token ids" in message) == ("prompt_name", True)


async def test_embeddings_default_prompt_applies_unless_a_request_says_otherwise(
    model: Path, tmp_path: Path
) -> None:
    settings = {"prompts": PROMPTS, "default_prompt_name": "passage"}
    async with folder_served(model, tmp_path / "f", **settings) as served:
        assert await tokens(served, input="a") == [ids("p:a")]
        assert await tokens(served, input="a", prompt="") == [ids("a")]
        assert await tokens(served, input="a", prompt_name="query") == [ids("q:a")]
        assert await tokens(served, input=[[5, 6]]) == [[5, 6]], "ids are used as they are"
        assert await tokens(served, "/embedding", content="a") == [ids("p:a")]
        pair = {"text_1": "a", "text_2": "b"}
        assert await tokens(served, "/v1/score", **pair) == [ids("p:a"), ids("p:b")]
        # As encode_query and encode_document, which never use the default.
        found = await tokens(served, "/v1/rerank", query="a", documents=["b"])
        assert found == [ids("q:a"), ids("d:b")]


async def test_embeddings_instruction_replaces_that_of_the_queries_prompt(
    model: Path, tmp_path: Path
) -> None:
    async with folder_served(model, tmp_path / "f", prompts={"query": QWEN}) as served:
        await served.http.post("/v1/embeddings", json={"input": "a", "instruction": "Find it"})
        tokenizer = served.app.state.penstock.tokenizer
        due = tokenizer.encode("Instruct: Find it\nQuery:a")
        assert [text.tokens for text in served.engine.texts] == [due]


async def test_embeddings_prompt_that_is_left_out_of_the_pooling_is_counted(
    model: Path, tmp_path: Path
) -> None:
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    async with folder_served(
        model, tmp_path / "f", pooling=pooling, prompts=PROMPTS, default_prompt_name="query"
    ) as served:
        await tokens(served, input=["a", "bde"])
        await tokens(served, input=[[1, 2, 3]])
        assert [text.skip for text in served.engine.texts] == [0]
        assert await tokens(served, input=["a", "bde"]) == [ids("q:a"), ids("q:bde")]
        assert [text.skip for text in served.engine.texts] == [3, 3], "with the start token"
        await tokens(served, input="a", add_special_tokens=False)
        assert [text.skip for text in served.engine.texts] == [2]
        left = {"truncation_side": "left", "input": "abde"}
        for most, tokens_left, skip in ((6, ":abde", 2), (4, "bde", 1)):
            found = await tokens(served, truncate_prompt_tokens=most, **left)
            assert found == [ids(tokens_left)]
            assert served.engine.texts[0].skip == skip, "what is left of the prompt"
        param, message = await refusal(served, input=["a", "b"], truncate_prompt_tokens=3)
        assert (param, "nothing is left" in message) == ("input.0", True)


async def test_embeddings_text_is_too_long_with_its_prompt(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    async with folder_served(model, folder, prompts=PROMPTS) as served:
        longest = served.engine.info.max_model_len
        param, message = await refusal(served, input="a" * (longest - 2), prompt_name="query")
        assert param == "input"
        assert str(longest) in message
        assert str(longest + 1) in message


@pytest.mark.parametrize(
    ("settings", "purpose", "prompt"),
    [
        (PROMPTS, "search_query", "q:"),
        (PROMPTS, "search_document", "d:"),
        (PROMPTS, "clustering", "k:"),
        ({"search_query": "s:", "query": "q:"}, "search_query", "s:"),
        ({"query": "q:", "passage": "p:"}, "search_document", ""),  # as encode_document
        (PROMPTS, None, ""),
    ],
)
async def test_cohere_purpose_chooses_the_prompt(
    model: Path, tmp_path: Path, settings: Any, purpose: str | None, prompt: str
) -> None:
    async with folder_served(model, tmp_path / "f", prompts=settings) as served:
        found = await tokens(served, "/v2/embed", texts=["a"], input_type=purpose)
        assert found == [ids(prompt + "a")]


async def test_cohere_purpose_without_a_prompt_is_refused_by_name(
    model: Path, tmp_path: Path
) -> None:
    async with folder_served(model, tmp_path / "f", prompts=PROMPTS) as served:
        response = await served.http.post(
            "/v2/embed", json={"texts": ["a"], "input_type": "search_query"}
        )
        assert "x-ignored-params" not in response.headers
        given = {"texts": ["a"], "input_type": "classification"}
        param, message = await refusal(served, "/v2/embed", **given)
        assert (param, "'classification'" in message) == ("input_type", True)


SHORT = vector(ids("ab"))[:2]


@pytest.mark.parametrize(
    ("config", "settings", "sizes"),
    [
        ({}, {}, "4"),
        ({"matryoshka_dimensions": [2, 3]}, {}, "2, 3, 4"),
        ({"is_matryoshka": True}, {}, None),
        ({}, {"truncate_dim": 3}, None),
    ],
)
async def test_embeddings_dimensions_are_those_that_the_model_was_trained_for(
    model: Path, tmp_path: Path, config: Any, settings: Any, sizes: str | None
) -> None:
    async with folder_served(model, tmp_path / "f", config=config, **settings) as served:

        async def length(size: int | None) -> int:
            response = await served.http.post(
                "/v1/embeddings", json={"input": "ab", "dimensions": size}
            )
            if response.status_code == 400:
                assert response.json()["error"]["param"] == "dimensions"
                assert f"one of {sizes}, not {size}" in response.json()["error"]["message"]
                assert "--allow-dimensions" in response.json()["error"]["message"]
                return 0
            return len(response.json()["data"][0]["embedding"])

        assert await length(SIZE) == SIZE, "the whole vector, beyond truncate_dim too"
        assert await length(1) == (1 if sizes is None else 0)
        assert await length(2) == (0 if sizes == "4" else 2)
        default = settings.get("truncate_dim", SIZE)
        assert await length(None) == default
        (card,) = (await served.http.get("/v1/models")).json()["data"]
        assert card["embedding_size"] == default


async def test_score_uses_the_similarity_of_the_folder(model: Path, tmp_path: Path) -> None:
    one, other = vector(ids("a")), vector(ids("bd"))
    due = {
        "cosine": one @ other / np.linalg.norm(one) / np.linalg.norm(other),
        "dot": one @ other,
        "euclidean": -np.linalg.norm(one - other),
        "manhattan": -np.abs(one - other).sum(),
    }
    for name, expected in due.items():
        async with folder_served(model, tmp_path / name, similarity_fn_name=name) as served:
            body = {"text_1": "a", "text_2": "bd"}
            answer = (await served.http.post("/v1/score", json=body)).json()
            assert answer["data"][0]["score"] == pytest.approx(float(expected))
