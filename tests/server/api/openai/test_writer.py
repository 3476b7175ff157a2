"""Writers: a whole answer equals the joined chunks of the stream of the same tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.generate import TokenLogprobs
from engine.protocol.outputs import TokenOutput
from server.api.openai.chat_writer import ChatWriter
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.schemas.completion import CompletionBody
from server.api.openai.writer import CompletionWriter, OpenAIWriter, Part, joined
from server.generation.choice import Choice
from server.generation.events import ChoiceEvents, Usage
from server.generation.prepare import PreparedRequest
from server.generation.prompts import Echo
from server.text.load_tokenizer import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.server.conftest import EOS
from tests.support.prepared import prepared_request

PROMPT = [64, 65]
USAGE = Usage(prompt_tokens=2, completion_tokens=14, cached_tokens=0)
FIELDS = [
    {},
    {"n": 2},
    {"logprobs": 2},
    {"return_token_ids": True},
    {"logprobs": 0, "return_token_ids": True, "n": 2},
    {"stop": "wör"},
    {"stop": "wör", "logprobs": 1},
]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def writer_for(api: str, tokenizer: Tokenizer, request: PreparedRequest, fields: Any) -> Any:
    if api == "completion":
        body = CompletionBody(prompt=PROMPT, **fields)
        return CompletionWriter(tokenizer, request, body)
    if "logprobs" in fields:
        fields = fields | {"logprobs": True, "top_logprobs": fields["logprobs"]}
    messages: Any = [{"role": "user", "content": "Hi"}]
    return ChatWriter(tokenizer, request, ChatBody(messages=messages, **fields))


def outputs(ids: Sequence[int], alternatives: int) -> list[TokenOutput]:
    found = []
    for token in ids:
        top = [(token, -0.5), (token ^ 1, -1.5)]
        logprobs = TokenLogprobs(-0.5, tuple(top[:alternatives])) if alternatives >= 0 else None
        finish: Any = "stop" if token == EOS else None
        found.append(TokenOutput(1, token, finish, logprobs, (TokenLogprobs(-1.0),)))
    return found


def taken(choice: Choice, tokens: Sequence[TokenOutput], rng: random.Random) -> list[ChoiceEvents]:
    """Return the events of a choice, taken at random moments."""
    updates = []
    for output in tokens:
        ended = choice.add(output)
        if ended or rng.random() < 0.3:
            updates.append(choice.take())
        if ended:
            break
    return updates


def chunks_of(stream: bytes) -> list[Any]:
    *events, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def accumulated(chunks: Sequence[Any], name: str) -> list[Any]:
    """Join the chunks of each choice as OpenAI's client does; `name` is that of the content."""
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for entry in chunk["choices"]:
            if "delta" in entry:
                entry[name] = entry.pop("delta")
            whole = choices.setdefault(entry["index"], {})
            for key, value in entry.items():
                if key != "index":
                    whole[key] = appended(whole.get(key), value)
    return [choices[index] for index in sorted(choices)]


def appended(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return first if second is None else second
    if isinstance(first, dict):
        keys = [*first, *(key for key in second if key not in first)]
        return {key: appended(first.get(key), second.get(key)) for key in keys}
    return first + second


@pytest.mark.parametrize("api", ["chat", "completion"])
@pytest.mark.parametrize("fields", FIELDS)
def test_whole_answer_equals_joined_stream(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]], api: str, fields: dict[str, Any]
) -> None:
    request = prepared_request(PROMPT, **fields)
    tokens = outputs([*encode("Hello wörld!"), EOS], request.options.num_logprobs)
    for seed in range(10):
        rng = random.Random(seed)
        writer = writer_for(api, tokenizer, request, fields)
        stream, answers = writer.opening(), []
        for index in range(request.num_choices):
            updates = taken(Choice(tokenizer, request, index), tokens, rng)
            stream += b"".join(map(writer.chunks, updates))
            (answer,) = taken(Choice(tokenizer, request, index), tokens, Never())
            answers.append(answer)
        whole = json.loads(writer.whole(answers, USAGE))
        chunks = chunks_of(stream + writer.closing(USAGE))
        found = accumulated(chunks, "message")
        for choice, entry in zip(whole["choices"], found, strict=True):
            del choice["index"]
            if api == "chat":
                assert choice["message"].pop("refusal", "absent") is None
            assert entry == choice
        assert {chunk["id"] for chunk in chunks} == {whole["id"]}


class Never(random.Random):
    """Takes events only at the end."""

    def random(self) -> float:
        return 1.0


def test_echo_with_logprobs_is_equal_in_stream_and_whole_answer(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> None:
    fields = {"echo": True, "logprobs": 1, "stream": True}
    request = prepared_request(PROMPT, echoes=[Echo("ab", [0, 1])], **fields)
    tokens = outputs([*encode("cd"), EOS], 1)
    writer: OpenAIWriter = writer_for("completion", tokenizer, request, fields)
    updates = taken(Choice(tokenizer, request, 0), tokens, random.Random(1))
    (answer,) = taken(Choice(tokenizer, request, 0), tokens, Never())
    stream = b"".join(map(writer.chunks, updates)) + writer.closing(USAGE)
    (found,) = accumulated(chunks_of(stream), "message")
    (choice,) = json.loads(writer.whole([answer], USAGE))["choices"]
    assert found == {name: value for name, value in choice.items() if name != "index"}
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        (None, None, None),
        (None, [1], [1]),
        ([1], None, [1]),
        ("a", "b", "ab"),
        ([1], [2], [1, 2]),
        ({"a": "x", "b": None}, {"b": [1], "c": "y"}, {"a": "x", "b": [1], "c": "y"}),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, {"a": {"b": "xy"}}),
    ],
)
def test_joined_appends_texts_and_lists(first: Any, second: Any, whole: Any) -> None:
    assert joined(first, second) == whole


@pytest.mark.parametrize(
    ("part", "empty"),
    [
        (Part({"content": ""}), True),
        (Part({"content": ""}, {"content": [], "refusal": None}), True),
        (Part({"content": "a"}), False),
        (Part({"content": ""}, {"content": [{}], "refusal": None}), False),
        (Part({"content": ""}, token_ids=[]), False),
        (Part({}, finish_reason="stop"), False),
    ],
)
def test_part_without_anything_to_say_is_empty(part: Part, empty: bool) -> None:
    assert part.is_empty is empty
