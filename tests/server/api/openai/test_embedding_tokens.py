"""The tokens that an encoder reads: `padding` and `add_special_tokens` of /v1/embeddings."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import BOS, EOS, write_model
from tests.support.fake_encoder import ENCODER, FakeEncoder
from tests.support.rig import Served, serving
from tests.support.served_paths import served_paths

A, B, D = 64, 65, 67  # the byte tokens of "a", "b" and "d"


@pytest.fixture
async def encoder(tmp_path: Path) -> AsyncIterator[Served]:
    folder = write_model(tmp_path / "padded")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "</s>"}))
    async with serving(FakeEncoder(lambda request: []), folder) as running:
        yield running


async def tokens_read(served: Served, path: str, **body: Any) -> list[list[int]]:
    """Return the tokens of the texts that the engine gets."""
    served.engine.texts.clear()
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    lists = [list(request.tokens) for request in served.engine.texts]
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, lists))
    return lists


@pytest.mark.parametrize("path", served_paths("/v1/embeddings", "/pooling"))
async def test_padding_max_length_fills_each_text_up_to_the_limit(
    encoder: Served, path: str
) -> None:
    found = await tokens_read(encoder, path, input=["a", "ab"], padding="max_length")
    length = ENCODER.max_model_len
    assert found == [
        [BOS, A] + [EOS] * (length - 2),
        [BOS, A, B] + [EOS] * (length - 3),
    ]


@pytest.mark.parametrize("given", ["ab", [A, B, D, A]])
async def test_padding_after_a_truncation_fills_up_to_the_limit(
    encoder: Served, given: Any
) -> None:
    fields = {"truncate_prompt_tokens": 2, "padding": "max_length"}
    (found,) = await tokens_read(encoder, "/v1/embeddings", input=given, **fields)
    start = [BOS, A] if given == "ab" else [A, B]
    assert found == start + [EOS] * (ENCODER.max_model_len - 2)


@pytest.mark.parametrize("padding", ["do_not_pad", None])
async def test_padding_that_is_off_changes_nothing(encoder: Served, padding: str | None) -> None:
    assert await tokens_read(encoder, "/v1/embeddings", input="a", padding=padding) == [[BOS, A]]


@pytest.mark.parametrize("padding", ["longest", True, 1, ""])
async def test_padding_of_another_value_is_refused(encoder: Served, padding: Any) -> None:
    body = {"input": "a", "padding": padding}
    response = await encoder.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "padding")


async def test_padding_without_a_padding_token_is_refused(model: Path) -> None:
    async with serving(FakeEncoder(lambda request: []), model) as plain:
        body = {"input": "a", "padding": "max_length"}
        response = await plain.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "padding")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_special_tokens": False}, [A, B, D]),
        ({"add_special_tokens": True}, [BOS, A, B, D]),
        ({"add_special_tokens": None}, [BOS, A, B, D]),
        ({"add_special_tokens": False, "truncate_prompt_tokens": 1}, [A]),
        (
            {
                "add_special_tokens": False,
                "truncate_prompt_tokens": 2,
                "truncation_side": "left",
            },
            [B, D],
        ),
        ({"add_special_tokens": False, "truncate_prompt_tokens": 9}, [A, B, D]),
    ],
)
@pytest.mark.parametrize("path", served_paths("/v1/embeddings", "/pooling"))
async def test_special_tokens_are_added_unless_the_request_refuses_them(
    encoder: Served, path: str, fields: dict[str, Any], expected: list[int]
) -> None:
    assert await tokens_read(encoder, path, input="abd", **fields) == [expected]


async def test_token_ids_of_another_model_are_refused_with_the_remedy(encoder: Served) -> None:
    """LangChain sends ids of cl100k unless it is set otherwise."""
    body = {"input": [[1, 2], [4438, 656]]}
    response = await encoder.http.post("/v1/embeddings", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input.1")
    assert "Token id 4438 is out of vocabulary" in error["message"]
    assert "check_embedding_ctx_length=False" in error["message"]
