"""Bodies made to cost the server much: each is refused at its first error."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from server.errors import to_api_error
from server.schemas.body import Body
from server.schemas.embedding import EmbeddingBody, ScoreBody
from server.schemas.generate import ChatBody, CompletionBody
from server.schemas.tokenize import DetokenizeBody, TokenizeBody

USER = {"role": "user", "content": "Hi"}
MANY = 400_000
HOSTILE: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatBody, {"messages": [{}] * MANY}),
    (ChatBody, {"messages": [{**USER, "content": [{}] * 4000}]}),
    (ChatBody, {"messages": [{**USER, "content": [{"type": "text", "text": ""}] * MANY}]}),
    (ChatBody, {"messages": [{**USER, "content": [{"type": "text", "text": ""}] * 9}] * 4000}),
    (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
    (ChatBody, {"messages": [USER], "stop": [1] * MANY}),
    (ChatBody, {"messages": [USER], "stop": ["a", *[1] * MANY]}),
    (ChatBody, {"messages": [USER], "stop_token_ids": ["a"] * MANY}),
    (ChatBody, {"messages": [USER], "logit_bias": {str(i): 1000 for i in range(MANY)}}),
    (CompletionBody, {"prompt": [1, *[""] * MANY]}),
    (CompletionBody, {"prompt": ["", *[1] * MANY]}),
    (CompletionBody, {"prompt": [[1], *[""] * MANY]}),
    (CompletionBody, {"prompt": [[1, *[""] * MANY]]}),
    (TokenizeBody, {"messages": [{}] * MANY}),
    (DetokenizeBody, {"tokens": [""] * MANY}),
    (EmbeddingBody, {"input": ["a", *[1] * MANY]}),
    (EmbeddingBody, {"input": [1, *[""] * MANY]}),
    (EmbeddingBody, {"input": [[1], *[""] * MANY]}),
    (ScoreBody, {"text_1": ["a", *[1] * MANY], "text_2": "a"}),
]


@pytest.mark.parametrize(("kind", "body"), HOSTILE)
def test_a_million_errors_are_one(kind: type[Body], body: dict[str, Any]) -> None:
    """Each takes a kilobyte, and all are made before the first can be told."""
    with pytest.raises(pydantic.ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 2  # an empty object lacks two members
    assert to_api_error(refused.value).status == 400
