"""What is made to cost the server much is refused before it does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pydantic
import pytest

from engine.config import EngineConfig
from engine.waiting import WaitingQueue
from server.errors import to_api_error
from server.plan import INLINE_CHARS
from server.schemas.body import Body
from server.schemas.embedding import EmbeddingBody, ScoreBody
from server.schemas.generate import ChatBody, CompletionBody
from server.schemas.tokenize import DetokenizeBody, TokenizeBody
from server.tokenizer import Tokenizer
from tests.server.fake_encoder import FakeEncoder
from tests.server.fake_engine import FakeEngine
from tests.server.rig import serving

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


@pytest.mark.parametrize("kind", ["chat", "completion", "embedding"])
async def test_of_a_crowd_only_those_with_a_place_are_tokenised(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They come at once, so the queue is empty when each is looked at first."""
    encode, encoded = Tokenizer.encode, []

    def slow(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        time.sleep(0.2)
        return encode(self, text[-5:], **options)

    engine = FakeEncoder(lambda r: []) if kind == "embedding" else FakeEngine(says("x"))
    engine.queue = WaitingQueue(EngineConfig(max_num_queued_reqs=3))
    async with serving(engine, model) as served:
        monkeypatch.setattr(Tokenizer, "encode", slow)
        text = "a" * 2 * INLINE_CHARS
        messages = [{"role": "user", "content": text}]
        path, body = {
            "chat": ("/v1/chat/completions", {"model": "tiny", "messages": messages}),
            "completion": ("/v1/completions", {"prompt": text}),
            "embedding": ("/v1/embeddings", {"input": text}),
        }[kind]
        asked = [served.http.post(path, json=body) for _ in range(12)]
        answers = await asyncio.gather(*asked)
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200] * 3 + [503] * 9
        assert len(encoded) == 3
        assert (await served.http.post(path, json=body)).status_code == 200
