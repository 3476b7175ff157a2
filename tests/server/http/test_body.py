"""Bodies built to be expensive are refused before they cost much time or memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from engine.client.admission import AdmissionControl
from engine.config import EngineConfig
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.schemas.completion import CompletionBody
from server.api.openai.schemas.embedding import EmbeddingBody, ScoreBody
from server.api.openai.schemas.tokenize import DetokenizeBody, TokenizeBody
from server.generation.off_loop import INLINE_CHARS
from server.http import body as body_module
from server.http.auth import MAX_BODIES
from server.http.body import LARGE, Body
from server.http.errors import to_api_error
from server.text.tokenizer import Tokenizer
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.rig import eventually, serving

USER = {"role": "user", "content": "Hi"}
MANY = 400_000
# Collecting the tests makes no body: each has a function that makes it.
HOSTILE: list[tuple[type[Body], Callable[[], dict[str, Any]]]] = [
    (ChatBody, lambda: {"messages": [{}] * MANY}),
    (ChatBody, lambda: {"messages": [{**USER, "content": [{}] * 4000}]}),
    (ChatBody, lambda: {"messages": [{**USER, "content": [{"type": "text", "text": ""}] * MANY}]}),
    (
        ChatBody,
        lambda: {"messages": [{**USER, "content": [{"type": "text", "text": ""}] * 9}] * 4000},
    ),
    (ChatBody, lambda: {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
    (ChatBody, lambda: {"messages": [USER], "stop": [1] * MANY}),
    (ChatBody, lambda: {"messages": [USER], "stop": ["a", *[1] * MANY]}),
    (ChatBody, lambda: {"messages": [USER], "stop_token_ids": ["a"] * MANY}),
    (ChatBody, lambda: {"messages": [USER], "bad_words": [1] * MANY}),
    (ChatBody, lambda: {"messages": [USER], "logit_bias": {str(i): 1000 for i in range(MANY)}}),
    (CompletionBody, lambda: {"prompt": [1, *[""] * MANY]}),
    (CompletionBody, lambda: {"prompt": ["", *[1] * MANY]}),
    (CompletionBody, lambda: {"prompt": [[1], *[""] * MANY]}),
    (CompletionBody, lambda: {"prompt": [[1, *[""] * MANY]]}),
    (TokenizeBody, lambda: {"messages": [{}] * MANY}),
    (DetokenizeBody, lambda: {"tokens": [""] * MANY}),
    (EmbeddingBody, lambda: {"input": ["a", *[1] * MANY]}),
    (EmbeddingBody, lambda: {"input": [1, *[""] * MANY]}),
    (EmbeddingBody, lambda: {"input": [[1], *[""] * MANY]}),
    (ScoreBody, lambda: {"text_1": ["a", *[1] * MANY], "text_2": "a"}),
]


@pytest.mark.parametrize(("kind", "make"), HOSTILE)
def test_validation_of_many_bad_items_stops_at_first_error(
    kind: type[Body], make: Callable[[], dict[str, Any]]
) -> None:
    """Without `fail_fast` pydantic would collect an error of a kilobyte for each item."""
    with pytest.raises(pydantic.ValidationError) as refused:
        kind.model_validate(make())
    assert refused.value.error_count() <= 2  # an empty object lacks two members
    assert to_api_error(refused.value).status == 400


@pytest.mark.parametrize("kind", ["chat", "completion", "embedding"])
async def test_burst_of_requests_tokenises_only_those_with_queue_place(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The requests arrive together, so the queue is still empty when each one is first checked."""
    encode, encoded, let_go = Tokenizer.encode, [], threading.Event()

    def held(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        let_go.wait(20)
        return encode(self, text[-5:], **options)

    engine = FakeEncoder(lambda r: []) if kind == "embedding" else FakeEngine(says("x"))
    engine.queue = AdmissionControl(EngineConfig(max_num_queued_reqs=3))
    async with serving(engine, model) as served:
        monkeypatch.setattr(Tokenizer, "encode", held)
        text = "a" * 2 * INLINE_CHARS
        messages = [{"role": "user", "content": text}]
        path, body = {
            "chat": ("/v1/chat/completions", {"model": "tiny", "messages": messages}),
            "completion": ("/v1/completions", {"prompt": text}),
            "embedding": ("/v1/embeddings", {"input": text}),
        }[kind]
        asked = [asyncio.create_task(served.http.post(path, json=body)) for _ in range(12)]
        await eventually(lambda: sum(task.done() for task in asked) == 9, "the rest is refused")
        let_go.set()
        codes = sorted(answer.status_code for answer in await asyncio.gather(*asked))
        assert codes == [200] * 3 + [503] * 9
        assert len(encoded) == 3
        assert (await served.http.post(path, json=body)).status_code == 200


async def test_tokenize_requests_leave_threads_for_prompts(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, decode = Tokenizer.encode, Tokenizer.decode
    now, most, let_go = 0, 0, threading.Event()

    def held(work: Any, text: Any, **options: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        let_go.wait(20)
        now -= 1
        return work(text[:3], **options)

    text = "a" * 2 * INLINE_CHARS
    async with serving(FakeEngine(says("x")), model) as served:
        bodies = [
            *[("/tokenize", {"prompt": text})] * 10,
            *[("/tokenize", {"messages": [{"role": "user", "content": text}]})] * 10,
            *[("/detokenize", {"tokens": [65] * len(text)})] * 10,
        ]
        with monkeypatch.context() as patched:
            patched.setattr(Tokenizer, "encode", lambda t, x, **o: held(encode.__get__(t), x, **o))
            patched.setattr(Tokenizer, "decode", lambda t, x, **o: held(decode.__get__(t), x, **o))
            asked = [asyncio.create_task(served.http.post(p, json=body)) for p, body in bodies]
            await eventually(lambda: now == 2, "two run")
            short = await served.http.post("/tokenize", json={"prompt": "", "return_token_strs": 1})
            assert short.status_code == 400, "refused without waiting"
        assert (await served.complete(prompt=text[:20])).status_code == 200
        longer = await served.complete(prompt=text, max_tokens=1)
        assert longer.json()["error"]["code"] == "context_length_exceeded", "it was tokenised"
        assert most == 2
        let_go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert most == 2


async def send_part(served: Any, size: int) -> tuple[Any, Any]:
    """Start a request, and send `size` bytes of a body of twice that length."""
    reader, writer = await asyncio.open_connection(*served.address)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {size * 2}\r\n\r\n".encode() + b" " * size)
    return reader, writer


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (ChatBody, lambda: {"messages": [{**USER, **{f"k{i}": 1 for i in range(MANY)}}]}),
        (CompletionBody, lambda: {"prompt": "a", **{f"k{i}": 1 for i in range(MANY)}}),
        (
            ChatBody,
            lambda: {"messages": [USER], "chat_template_kwargs": {f"k{i}": 1 for i in range(MANY)}},
        ),
        (EmbeddingBody, lambda: {"input": "a", **{f"k{i}": 1 for i in range(MANY)}}),
    ],
)
def test_validation_object_with_too_many_members_is_refused(
    kind: type[Body], make: Callable[[], dict[str, Any]]
) -> None:
    with pytest.raises(
        pydantic.ValidationError, match=r"at most (1024|64) members, not 400"
    ) as refused:
        kind.model_validate(make())
    assert refused.value.error_count() == 1


def test_validation_unknown_members_are_dropped_and_listed() -> None:
    """Unknown members could take 200 MB until the answer is complete. `ignored` lists them."""
    message = {**USER, "audio": [[]], "refusal": None}
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = ChatBody.model_validate(
        {"messages": [message, {**USER, "content": [text]}], "foo": [[]], "metadata": {"a": "b"}}
    )
    assert body.ignored == ["foo", "messages.audio", "messages.content.cache_control"]
    first, second = body.messages
    assert isinstance(second.content, list)
    assert [p.model_extra for p in (body, first, second, second.content[0])] == [{}] * 4


async def test_error_about_long_key_does_not_repeat_it(model: Path, says: Any) -> None:
    async with serving(FakeEngine(says("x")), model) as served:
        long = "a" * 100_000
        for field in ({"logit_bias": {long: 1000}}, {"chat_template_kwargs": {long: 1}}):
            answer = await served.chat(**field)
            assert answer.status_code == 400
            assert len(answer.content) < 1000
            assert answer.json()["error"]["param"] == next(iter(field))


@pytest.mark.slow
async def test_bodies_in_transit_over_total_limit_return_503(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 100_000
    monkeypatch.setattr("server.http.auth.MIN_BODY_BUDGET", 0)
    async with serving(FakeEngine(says("x")), model, max_body_bytes=2 * size) as served:
        senders = [await send_part(served, size) for _ in range(2 * MAX_BODIES + 1)]
        done, _ = await asyncio.wait(
            [asyncio.create_task(reader.read(-1)) for reader, _ in senders],
            return_when=asyncio.FIRST_COMPLETED,
        )
        [refused] = [task.result() for task in done]
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"server_overloaded" in refused
        assert b"retry-after: 5" in refused
        assert b"connection: close" in refused
        for _, writer in senders:
            writer.close()
        while (await served.complete()).status_code == 503:  # noqa: ASYNC110 - wait for their ends
            await asyncio.sleep(0.01)
        assert (await served.complete(unknown="a" * size)).status_code == 200


async def test_large_body_delays_next_large_body_but_no_small_one(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one sender of slow-to-parse bodies would block the event loop for every stream."""
    monkeypatch.setattr("server.http.large_bodies.PAUSE", 1e9)
    async with serving(FakeEngine(says("x")), model) as served:
        large = {"unknown": "a" * LARGE}
        assert (await served.complete(**large)).status_code == 200  # the first one does not wait
        second = asyncio.create_task(served.complete(**large))
        body = {"prompt": "a", **large}
        tokenised = asyncio.create_task(served.http.post("/tokenize", json=body))
        for _ in range(20):
            assert (await served.complete()).status_code == 200
        assert not second.done()
        assert not tokenised.done()
        monkeypatch.setattr("server.http.large_bodies.PAUSE", 0)
        served.app.state.penstock.body_turn.__self__._turns.release("")
        assert (await second).status_code == (await tokenised).status_code == 200


async def test_large_body_of_disconnected_client_is_not_parsed(
    model: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise clients that send and disconnect would delay all other large bodies."""
    read: list[int] = []

    def validated(raw: bytes, kind: type[Body]) -> Any:
        read.append(len(raw))
        return original(raw, kind)

    original = body_module._validated
    monkeypatch.setattr(body_module, "_validated", validated)
    monkeypatch.setattr("server.http.large_bodies.PAUSE", 1e9)
    async with serving(FakeEngine(says("x")), model) as served:
        turns = served.app.state.penstock.body_turn.__self__
        for size in (LARGE, 2 * LARGE):
            leaving = asyncio.create_task(served.complete(unknown="a" * size))
            await eventually(lambda: not turns._turns._shares.has_room(), "the first has its turn")
            await asyncio.wait({leaving}, timeout=0.3)
            leaving.cancel()
        staying = asyncio.create_task(served.complete(unknown="a" * 3 * LARGE))
        await asyncio.sleep(0.3)
        monkeypatch.setattr("server.http.large_bodies.PAUSE", 0)
        turns._turns.release("")
        assert (await staying).status_code == 200
    assert [size // LARGE for size in read] == [1, 3]


async def test_large_bodies_sent_together_are_all_answered(model: Path, says: Any) -> None:
    async with serving(FakeEngine(says("x")), model) as served:
        many = [served.complete(unknown="a" * LARGE) for _ in range(5)]
        wrong = served.complete(unknown="a" * LARGE, max_tokens="many")  # must end its turn too
        answers = await asyncio.gather(wrong, *many)
        assert [answer.status_code for answer in answers] == [400, *[200] * 5]
