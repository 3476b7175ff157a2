"""Inputs of embeddings in the shapes of llama.cpp: mixed lists and objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import BOS
from tests.support.fake_encoder import FakeEncoder
from tests.support.rig import Served, serving

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ([12, "ab", 13], [[12, 64, 65, 13]]),
        (["ab", [12, 13]], [[BOS, 64, 65], [12, 13]]),
        ([[1, 2], [12, "a"]], [[1, 2], [12, 64]]),
        (["a", 12.0], [[64, 12]]),
        ([["a", "b"], "a"], [[64, 65], [BOS, 64]]),
        ({"prompt_string": "a"}, [[BOS, 64]]),
        ({"content": PARTS}, [[BOS, 64, 65]]),
        (["a", {"prompt_string": "b"}, {"content": PARTS}], [[BOS, 64], [BOS, 65], [BOS, 64, 65]]),
    ],
)
async def test_embeddings_take_mixed_lists_and_objects(
    encoder: Served, given: Any, tokens: list[list[int]]
) -> None:
    response = await encoder.http.post("/v1/embeddings", json={"input": given})
    assert response.status_code == 200
    assert [text.tokens for text in encoder.engine.texts] == tokens


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "input"),
        ({"prompt_string": "a", "content": PARTS}, "input"),
        ({"content": "a"}, "input.content"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "input.content.0.type"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "input.multimodal_data"),
        (["a", []], "input.1"),
        (["a", True], "input.1"),
        ([1, "a", True], "input.2"),
        ([1, 2.5], "input.1"),
        ([[1, -1]], "input.0.1"),
        ([999], "input"),
        ([999, "a"], "input"),
        ([1, "a" * 2000], "input"),
        (5, "input"),
    ],
)
async def test_embeddings_bad_shape_is_a_400_naming_it(
    encoder: Served, given: Any, param: str
) -> None:
    response = await encoder.http.post("/v1/embeddings", json={"input": given})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not encoder.engine.texts


async def test_embeddings_with_a_million_ids_are_checked_quickly(encoder: Served) -> None:
    response = await encoder.http.post("/v1/embeddings", json={"input": [1] * 1_000_000})
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("side", "tokens"), [(None, [BOS, 64, 65]), ("right", [BOS, 64, 65]), ("left", [BOS, 66, 67])]
)
async def test_embeddings_truncation_side_says_what_is_cut_off(
    encoder: Served, side: str | None, tokens: list[int]
) -> None:
    fields = {"truncate_prompt_tokens": 3, "truncation_side": side}
    body = {"input": ["abcd", [1, 2, 3, 4]], **fields}
    await encoder.http.post("/v1/embeddings", json=body)
    ids = [2, 3, 4] if side == "left" else [1, 2, 3]
    assert [text.tokens for text in encoder.engine.texts] == [tokens, ids]


@pytest.mark.parametrize(
    ("side", "tokens"), [(None, [5, 6, 7]), ("left", [5, 6, 7]), ("right", [1, 2, 3])]
)
async def test_completions_truncation_side_says_what_is_cut_off(
    served: Served, side: str | None, tokens: list[int]
) -> None:
    fields = {"truncate_prompt_tokens": 3, "truncation_side": side}
    await served.complete(prompt=[1, 2, 3, 4, 5, 6, 7], **fields)
    assert served.engine.requests[-1].prompt == tokens
