"""A budget for thoughts: every format and API keeps to it, and the answer goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken

from server.replay.request import replay_body
from server.text.parsers.formats import BY_NAME, REASONING_BY_NAME, ChannelFormat
from tests.server.conftest import EOS, write_model
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.limited_thoughts import thinking
from tests.support.recorded import written_record
from tests.support.rig import Served, serving
from tests.support.written_calls import written

HARMONY = BY_NAME["harmony"]
assert isinstance(HARMONY, ChannelFormat)
FORMATS = [*REASONING_BY_NAME, "harmony"]
ANSWER = "Yes, 7."
THOUGHT = "abcdefgh" * 60  # each byte is a token
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
ASKED = [{"role": "user", "content": "Hi"}]


def marks_of(name: str) -> tuple[str, str, str]:
    """Return the texts that open and close thoughts, and the one in front of the answer."""
    if name == "harmony":
        final = f"{HARMONY.channel}final{HARMONY.message}"
        opening = f"{HARMONY.channel}analysis{HARMONY.message}"
        return opening, f"{HARMONY.end}{HARMONY.start}assistant", final
    reasoning = REASONING_BY_NAME[name]
    return reasoning.open.strip(), reasoning.close.strip(), ""


class Thinker:
    """A model that thinks in one format. With `is_open`, its prompt opens the thoughts."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        tokens: bool,
        is_open: bool = False,
        answer: str | None = None,
    ) -> None:
        self.folder = write_model(folder)
        file = folder / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self.opening, self.closing, final = marks_of(name)
        texts = [self.opening, self.closing]
        if name == "harmony":
            texts = [HARMONY.start, HARMONY.channel, HARMONY.message, HARMONY.end]
        if name == "solar_open":
            texts = ["<|think|>", "<|end|>", "<|begin|>", "<|content|>"]
        if tokens:
            tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
            tokenizer.save(str(file))
        answer = final + ANSWER if answer is None else answer
        opened = self.opening if is_open else ""
        (folder / "chat_template.jinja").write_text(PLAIN + opened)
        flag = "tool_call_parser" if name == "harmony" else "reasoning_parser"
        self.flags = {flag: name}
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.vocab_size = tokenizer.get_vocab_size()
        written = "" if is_open else self.opening
        script = thinking(file, self.encode(written + THOUGHT), self.encode(answer), EOS)
        info = msgspec.structs.replace(INFO, vocab_size=self.vocab_size, max_model_len=2048)
        self.engine = FakeEngine(script, info=info)

    def serving(self, **flags: Any) -> Any:
        return serving(self.engine, self.folder, **(self.flags | flags))


async def whole(served: Served, **fields: Any) -> dict[str, Any]:
    response = await served.chat(messages=ASKED, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(served: Served, **fields: Any) -> tuple[str, str, str | None, dict[str, Any]]:
    """Return reasoning, content, finish reason and usage of a stream."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await served.chat(messages=ASKED, **options, **fields)
    reasoning, content, finish, usage = "", "", None, {}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            reasoning += choice["delta"].get("reasoning_content") or ""
            content += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    return reasoning, content, finish, usage


@pytest.mark.variants(8)
@pytest.mark.parametrize("budget", [0, 1, 16, 200])
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
async def test_thoughts_of_every_format_keep_to_the_budget(
    tmp_path: Path, name: str, tokens: bool, budget: int
) -> None:
    thinker = Thinker(tmp_path / "tiny", name, tokens=tokens)
    async with thinker.serving() as served:
        answer = await whole(served, thinking_token_budget=budget, max_tokens=400)
        stream = await streamed(served, thinking_token_budget=budget, max_tokens=400)
    [choice] = answer["choices"]
    message, usage = choice["message"], answer["usage"]
    assert (message.get("reasoning_content") or "") == THOUGHT[:budget]
    assert (message["content"], choice["finish_reason"]) == (ANSWER, "stop")
    assert stream == (THOUGHT[:budget], ANSWER, "stop", usage)
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    assert details["reasoning_tokens"] == budget
    others = len(thinker.encode(thinker.opening)) + len(thinker.encode(thinker.closing))
    final = thinker.encode(marks_of(name)[2] + ANSWER)
    assert usage["completion_tokens"] == budget + others + len(final) + 1  # the end token


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALLED = [("weather", {"city": "Rome"})]


@pytest.mark.variants(6)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", BY_NAME)
async def test_calls_of_every_format_follow_limited_thoughts(
    tmp_path: Path, name: str, choice: str
) -> None:
    reasoning = "harmony" if name == "harmony" else "think"
    thinker = Thinker(
        tmp_path / "tiny", reasoning, tokens=True, answer=written(BY_NAME[name], CALLED)
    )
    fields = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 400}
    async with thinker.serving(tool_call_parser=name) as served:
        answer = await whole(served, thinking_token_budget=16, **fields)
    [found] = answer["choices"]
    assert found["message"]["reasoning_content"] == THOUGHT[:16]
    [call] = found["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == CALLED[0]
    assert found["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("is_open", [True, False])
async def test_structured_answer_follows_limited_thoughts(tmp_path: Path, is_open: bool) -> None:
    answer = '{"a":1}'
    thinker = Thinker(tmp_path / "tiny", "think", tokens=True, is_open=is_open, answer=answer)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    async with thinker.serving() as served:
        found = await whole(served, thinking_token_budget=16, response_format=wanted, max_tokens=99)
    message = found["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT[:16], answer)


@pytest.fixture
async def thinking_server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose prompts open thoughts, and whose template has no switch for them."""
    thinker = Thinker(tmp_path / "tiny", "think", tokens=True, is_open=True)
    async with thinker.serving(record=str(tmp_path / "record.jsonl")) as served:
        yield served


def reasoning_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"].get("reasoning_content") or ""


@pytest.mark.parametrize(
    "name",
    [
        "thinking_token_budget",
        "thinking_budget_tokens",
        "reasoning_budget_tokens",
        "reasoning_budget",
    ],
)
async def test_budget_has_the_names_of_other_servers(thinking_server: Served, name: str) -> None:
    assert reasoning_of(await whole(thinking_server, **{name: 3})) == THOUGHT[:3]
    assert reasoning_of(await whole(thinking_server, **{name: -1})) == THOUGHT + ANSWER
    refused = await thinking_server.chat(messages=ASKED, **{name: -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_effort_limits_thoughts_that_the_template_cannot(
    thinking_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.generation.thinking.BUDGETS", {"low": 5, "medium": 50})
    lengths = {}
    for effort in ("none", "minimal", "low", "medium", "high"):
        response = await thinking_server.chat(messages=ASKED, reasoning_effort=effort)
        assert "x-ignored-params" not in response.headers
        lengths[effort] = len(reasoning_of(response.json()))
    unlimited = len(THOUGHT + ANSWER)
    assert lengths == {"none": 0, "minimal": 0, "low": 5, "medium": 50, "high": unlimited}


@pytest.mark.parametrize(
    ("thinking", "count"),
    [
        ({"type": "enabled", "budget_tokens": 7}, 7),
        ({"type": "disabled"}, 0),
        ({"type": "between_tools"}, 0),
    ],
)
async def test_messages_of_anthropic_keep_to_the_budget(
    thinking_server: Served, thinking: dict[str, Any], count: int
) -> None:
    body = {"messages": ASKED, "max_tokens": 100, "thinking": thinking}
    response = await thinking_server.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    blocks = {block["type"]: block for block in response.json()["content"]}
    assert blocks["text"]["text"] == ANSWER
    assert blocks.get("thinking", {"thinking": ""})["thinking"] == THOUGHT[:count]
    details = response.json()["usage"]["output_tokens_details"]
    assert details == {"thinking_tokens": count}


async def test_effort_of_responses_limits_thoughts(thinking_server: Served) -> None:
    body = {"input": "Hi", "reasoning": {"effort": "none"}}
    response = await thinking_server.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    types = [item["type"] for item in response.json()["output"]]
    assert types == ["message"]


async def test_flag_limits_thoughts_that_the_template_cannot_turn_off(tmp_path: Path) -> None:
    thinker = Thinker(tmp_path / "tiny", "think", tokens=True, is_open=True)
    async with thinker.serving(reasoning="off") as served:
        assert reasoning_of(await whole(served)) == ""


async def test_each_choice_has_the_budget(thinking_server: Served) -> None:
    answer = await whole(thinking_server, thinking_token_budget=4, n=3)
    found = [choice["message"]["reasoning_content"] for choice in answer["choices"]]
    assert found == [THOUGHT[:4]] * 3
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


@pytest.mark.parametrize("budget", [16, 200])
async def test_answer_that_is_cut_within_its_thoughts_says_length(
    thinking_server: Served, budget: int
) -> None:
    answer = await whole(thinking_server, thinking_token_budget=budget, max_tokens=10)
    [choice] = answer["choices"]
    assert (reasoning_of(answer), choice["message"]["content"]) == (THOUGHT[:10], "")
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 10}
    grammar = thinking_server.engine.requests[-1].grammar
    assert grammar is None, "a budget that max_tokens keeps costs nothing"


async def test_model_that_does_not_think_has_no_use_for_a_budget(served: Served) -> None:
    response = await served.chat(messages=ASKED, thinking_token_budget=3)
    assert response.headers["x-ignored-params"] == "thinking_token_budget"
    body = {"prompt": "Hi", "thinking_token_budget": 3}
    response = await served.http.post("/v1/completions", json=body)
    assert response.headers["x-ignored-params"] == "thinking_token_budget"
    assert served.engine.requests[-1].grammar is None


async def test_raw_prompt_that_opens_thoughts_is_limited(thinking_server: Served) -> None:
    async def post(**fields: Any) -> Any:
        body = {"max_tokens": 60, "thinking_token_budget": 2, **fields}
        return await thinking_server.http.post("/v1/completions", json=body)

    response = await post(prompt="Think.<think>\n")
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == f"{THOUGHT[:2]}</think>{ANSWER}"
    mixed = await post(prompt=["<think>", "Hi"])
    assert (mixed.status_code, mixed.json()["error"]["param"]) == (400, "thinking_token_budget")
    held = await post(prompt="<think>", structured_outputs={"regex": "a"})
    assert (held.status_code, held.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_recorded_answer_is_replayed_with_its_budget(
    thinking_server: Served, tmp_path: Path
) -> None:
    await whole(thinking_server, thinking_token_budget=4, max_tokens=60)
    [recorded] = (await written_record(tmp_path / "record.jsonl", 1)).values()
    body = replay_body(recorded, 1000)
    assert body["thinking_token_budget"] == 4
    response = await thinking_server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == recorded.tokens
    first, second = thinking_server.engine.requests
    assert first.grammar is not None
    assert second.grammar is not None
    assert first.grammar.source == second.grammar.source
    assert set(first.params.stop_token_ids) == set(second.params.stop_token_ids)
