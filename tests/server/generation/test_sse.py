"""Streamed responses, checked chunk by chunk and byte by byte."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import openai
import pytest

from server.generation.sse import PIECE, pieces
from server.text.load_tokenizer import load_tokenizer
from tests.server.conftest import EOS
from tests.support.fake_engine import INFO, NOT_FINITE, FakeEngine
from tests.support.reference_data import CHECKPOINTS, located, reference
from tests.support.rig import eventually, serving

USER = {"role": "user", "content": "Hi"}


def events(text: str) -> list[Any]:
    """Return the data of each server-sent event; also check the framing."""
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        if event.startswith(":"):
            continue
        assert event.startswith("data: ")
        assert "\n" not in event
        data = event[6:]
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def test_chat_stream_has_expected_bytes(served):
    served.engine.burst = 100
    response = await served.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    first = json.loads(response.text.split("\n")[0][6:])
    fixed = f'"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]}'
    fixed += f',"model":"tiny","system_fingerprint":"{first["system_fingerprint"]}"'
    chunk = f'data: {{{fixed},"choices":[{{"index":0,"delta":'
    assert response.text == (
        f'{chunk}{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{chunk}{{"content":"Hello wörld!"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{chunk}{{}},"logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_completion_stream_has_expected_bytes(served):
    served.engine.burst = 100
    text = (await served.complete(stream=True)).text
    first = json.loads(text.split("\n")[0][6:])
    fixed = f'"id":"{first["id"]}","object":"text_completion","created":{first["created"]}'
    fixed += f',"model":"tiny","system_fingerprint":"{first["system_fingerprint"]}"'
    chunk = f'data: {{{fixed},"choices":[{{"index":0,"text":'
    assert text == (
        f'{chunk}"Hello wörld!","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{chunk}"","logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_chat_stream_opens_all_choices_before_any_text(served):
    chunks = events((await served.chat(stream=True, n=3)).text)
    assert chunks.pop() == "[DONE]"
    opened = [chunk["choices"][0] for chunk in chunks[:3]]
    assert [choice["index"] for choice in opened] == [0, 1, 2]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in opened)
    rest = [chunk["choices"][0] for chunk in chunks[3:]]
    assert all("role" not in choice["delta"] for choice in rest)
    for index in range(3):
        mine = [choice for choice in rest if choice["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello wörld!"
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["delta"] == {}


async def test_include_usage_adds_final_chunk_with_usage(served):
    *chunks, last, done = events(
        (await served.chat(stream=True, stream_options={"include_usage": True})).text
    )
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 14
    assert last["id"] == chunks[0]["id"]
    assert all("usage" not in chunk for chunk in events((await served.chat(stream=True)).text)[:-1])


@pytest.mark.parametrize("include", [None, False])
async def test_continuous_usage_needs_include_usage(served, include):
    options = {"continuous_usage_stats": True, "include_usage": include}
    answer = await served.complete(stream=True, stream_options=options)
    *chunks, done = events(answer.text)
    assert (done, len(chunks) > 1) == ("[DONE]", True)
    assert all("usage" not in chunk for chunk in chunks)


async def test_continuous_usage_counts_the_tokens_of_each_chunk(served):
    options = {"continuous_usage_stats": True, "include_usage": True}
    answer = await served.complete(stream=True, prompt=["a", "bc"], n=2, stream_options=options)
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 4 * 14
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == 5, "with a BOS token each"
        assert usage["total_tokens"] == 5 + usage["completion_tokens"]
    assert chunks[-1]["choices"] == []


async def test_openai_client_accumulates_streamed_choices(served):
    async with served.openai.chat.completions.stream(
        model="tiny", messages=[USER], n=2, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["Hello wörld!"] * 2
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2
    assert len(answer.choices[1].logprobs.content) == 13
    assert answer.usage.completion_tokens == 28


@pytest.mark.parametrize("burst", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "text"),
    [("o w", "Hell"), (["zz", "ld"], "Hello wör"), ("ö", "Hello w"), ("!x", "Hello wörld!")],
)
async def test_stop_string_is_cut_from_stream_and_response(served, stop, text, burst):
    served.engine.burst = burst
    chunks = events((await served.chat(stream=True, stop=stop)).text)[:-1]
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    whole = (await served.chat(stop=stop)).json()
    assert streamed == whole["choices"][0]["message"]["content"] == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_stop_string_ends_generation_and_token_count(served):
    served.engine.burst = 3
    body = (await served.chat(stop="ll", return_token_ids=True)).json()
    assert body["usage"]["completion_tokens"] == 4
    assert len(body["choices"][0]["token_ids"]) == 4
    assert served.engine.aborted == [1]
    body = (await served.chat(stop="ll", include_stop_str_in_output=True)).json()
    assert body["choices"][0]["message"]["content"] == "Hell"
    assert await served.metric("request_success_total", finished_reason="stop") == 2
    assert await served.metric("aborts_total") == 0


async def test_min_tokens_delays_stop_string(served):
    body = (await served.chat(stop="l", min_tokens=5)).json()
    assert body["choices"][0]["message"]["content"] == "Hello wör"


@pytest.mark.parametrize("min_tokens", [3, 4, 5])
async def test_stop_string_that_begins_before_min_tokens_still_stops(served, min_tokens):
    asked = {"stop": ["el", "llo "], "min_tokens": min_tokens}
    body = (await served.chat(**asked)).json()
    assert body["choices"][0]["message"]["content"] == "He"
    assert body["choices"][0]["finish_reason"] == "stop"
    chunks = events((await served.chat(stream=True, **asked)).text)[:-1]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == "He"


async def test_tokens_available_together_are_sent_in_one_chunk(served):
    served.engine.gate.clear()
    task = asyncio.create_task(served.chat(stream=True))
    await eventually(lambda: bool(served.engine.running), "the request runs")
    for _ in range(14):
        served.engine._step()
    served.engine.gate.set()
    chunks = events((await task).text)
    assert [c["choices"][0]["delta"].get("content") for c in chunks[:-1]] == [
        "",
        "Hello wörld!",
        None,
    ]


async def test_incomplete_utf8_character_is_held_back(served):
    deltas = [
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in events((await served.chat(stream=True)).text)[:-1]
    ]
    assert "".join(deltas) == "Hello wörld!"
    assert not any("\ufffd" in delta for delta in deltas)


async def test_streamed_logprobs_and_token_ids_cover_the_whole_text(served, encode):
    text = (await served.chat(stream=True, logprobs=True, return_token_ids=True)).text
    first, *chunks = events(text)[:-1]
    assert first["prompt_token_ids"] == served.engine.requests[0].prompt
    choices = [chunk["choices"][0] for chunk in chunks]
    scored = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert bytes(b for entry in scored for b in entry["bytes"]).decode() == "Hello wörld!"
    ids = [i for choice in choices for i in choice.get("token_ids", ())]
    assert ids == [*encode("Hello wörld!"), EOS]


RECORDED = "83b060bae42eb41c4f1edbb7c1542b954b37d9dfd1910b964ddebc9677e6ae85.sse"


@pytest.mark.parametrize(
    "file",
    ["openai-streams/logprobs.sse", reference(f"openai-spec/openai-python-sse/{RECORDED}")],
)
async def test_stream_chunks_have_the_keys_of_an_openai_stream(served, file: str):
    recorded = located(file).read_text()
    theirs = [chunk for chunk in events(recorded.strip() + "\n\n") if chunk != "[DONE]"]
    mine = events((await served.chat(stream=True, logprobs=True, top_logprobs=1)).text)[:-1]
    optional = {"system_fingerprint", "refusal"}

    def keys(chunk: Any) -> tuple[Any, ...]:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        return tuple(
            list(d.keys() - optional) and sorted(d.keys() - optional)
            for d in (chunk, choice, delta)
        )

    def entry(chunks: list[Any]) -> Any:
        scored = (c["choices"][0]["logprobs"] for c in chunks if c.get("choices"))
        return next(s["content"][0] for s in scored if s and s["content"])

    theirs = [chunk for chunk in theirs if chunk["choices"]]
    assert [keys(mine[i]) for i in (0, 1, -1)] == [keys(theirs[i]) for i in (0, 1, -1)]
    assert entry(mine).keys() == entry(theirs).keys()


async def test_stream_without_tokens_sends_pings(model, says):
    engine = FakeEngine(says("x"))
    engine.gate.clear()
    async with serving(engine, model, ping_interval=0.1) as served:
        body = {"messages": [USER], "stream": True}
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_text()
            seen = ""
            while ": ping\n\n" not in seen:
                seen += await anext(lines)
            engine.gate.set()
            async for text in lines:
                seen += text
    assert re.sub(r"(: ping\n\n)+", "", seen).startswith("data: ")
    assert events(seen)[-1] == "[DONE]"


async def test_ping_of_a_response_is_an_event_until_the_answer_begins(model, says):
    """Codex counts events as signs of life, and no comments."""
    engine = FakeEngine(says("x"))
    engine.gate.clear()
    async with serving(engine, model, ping_interval=0.1) as served:
        body = {"input": "Hi", "stream": True}
        async with served.http.stream("POST", "/v1/responses", json=body) as response:
            lines = response.aiter_text()
            seen = ""
            while seen.count(": ping\n") < 2:
                seen += await anext(lines)
            engine.gate.set()
            async for text in lines:
                seen += text
    *blocks, _ = seen.split("\n\n")
    again = [block for block in blocks if block.startswith(":")]
    assert {block.removeprefix(": ping\n") for block in again} == {blocks[1]}
    assert blocks[1].startswith("event: response.in_progress\ndata: {")
    assert blocks[-1].startswith("event: response.completed")


async def test_openai_client_raises_on_broken_stream(model, encode):
    script = [*encode("Hello"), NOT_FINITE]
    async with serving(FakeEngine(lambda r: script, delay=0.005), model) as served:
        text = ""
        stream = await served.openai.chat.completions.create(
            model="tiny", messages=[USER], stream=True
        )
        with pytest.raises(openai.APIError) as caught:  # noqa: PT012
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == "Hello"
        assert caught.value.code == "numerical_error"


async def test_non_finite_logits_fail_only_their_request(model, encode):
    def script(request):
        return [NOT_FINITE] if request.priority else [*encode("fine"), EOS]

    async with serving(FakeEngine(script), model) as served:
        bad, good = await asyncio.gather(served.chat(priority=1), served.chat())
        assert bad.status_code == 500
        assert bad.json()["error"]["code"] == "numerical_error"
        assert bad.headers["x-should-retry"] == "false"
        assert good.json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("name", CHECKPOINTS)
async def test_stream_with_real_tokenizer_equals_whole_response(name: str):
    """With echo, the response is prompt plus output, including leading spaces."""
    folder = located(name)
    tokenizer = load_tokenizer(folder)
    text = "Once upon a time, there was a little girl named Zoë. 🌍 She"
    prompt = tokenizer.encode("Once upon a time,")
    ids = tokenizer.encode(text)[len(prompt) :]
    info = msgspec.structs.replace(INFO, vocab_size=tokenizer.vocab_size)
    async with serving(FakeEngine(lambda r: ids, info=info), folder) as served:
        fields = {"prompt": "Once upon a time,", "echo": True, "max_tokens": len(ids)}
        whole = (await served.complete(**fields)).json()["choices"][0]["text"]
        chunks = events((await served.complete(stream=True, **fields)).text)[:-1]
    assert served.engine.requests[0].prompt == prompt
    assert whole == "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@pytest.mark.parametrize("sizes", [[10], [60_000, 60_000, 10], [200_000, 9], [65_536, 65_534, 1]])
@pytest.mark.parametrize("more", [True, False])
def test_pieces_end_between_events_if_events_fit(sizes, more):
    parts = [b"x" * size + b"\n\n" for size in sizes]
    message = {"type": "http.response.body", "body": b"".join(parts), "more_body": more}
    sent = list(pieces(message))
    bodies = [piece["body"] for piece in sent]
    assert b"".join(bodies) == message["body"]
    assert max(map(len, bodies)) <= PIECE
    assert [piece["more_body"] for piece in sent] == [True] * (len(sent) - 1) + [more]
    if max(map(len, parts)) <= PIECE:
        assert all(body.endswith(b"\n\n") for body in bodies)
