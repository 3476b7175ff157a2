"""/tokenize and /detokenize with the names of llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import BOS
from tests.support.rig import Served


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"content": "ab"}, [64, 65]),
        ({"content": "ab", "add_special": False}, [64, 65]),
        ({"content": "ab", "add_special": True}, [BOS, 64, 65]),
        ({"content": "<s>a", "parse_special": True}, [BOS, 64]),
        ({"prompt": "ab"}, [BOS, 64, 65]),
        ({"prompt": "ab", "add_special": False}, [64, 65]),
        ({"content": ""}, []),
    ],
)
async def test_tokenize_content_has_no_special_tokens_by_default(
    served: Served, fields: dict[str, Any], tokens: list[int]
) -> None:
    response = await served.http.post("/tokenize", json=fields)
    assert response.json()["tokens"] == tokens


async def test_tokenize_with_pieces_has_texts_or_bytes(served: Served) -> None:
    fields = {"content": "aö", "with_pieces": True}
    tokens = (await served.http.post("/tokenize", json=fields)).json()["tokens"]
    assert tokens[0] == {"id": 64, "piece": "a"}
    assert [token["piece"] for token in tokens[1:]] == [[0xC3], [0xB6]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": "a", "prompt": "a"}, "prompt"),
        ({"content": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"content": "a", "parse_special": False}, "parse_special"),
        ({"content": "a", "continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_tokenize_refuses_what_it_cannot_do(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    response = await served.http.post("/tokenize", json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_detokenize_has_the_text_under_both_names(served: Served) -> None:
    body = (await served.http.post("/detokenize", json={"tokens": [64, 65]})).json()
    assert body == {"prompt": "ab", "content": "ab"}
