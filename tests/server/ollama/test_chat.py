"""POST /api/chat: streams and whole answers, tools, thoughts, formats, and the model's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.ollama.messages import OllamaMessage, template_messages
from server.ollama.writer import LinesWriter
from server.text.content_parts import image_part, text_part
from tests.server.ollama.conftest import CALLS, HI, ask, lines_of
from tests.server.ollama.shapes import CHAT_END, CHAT_PART, ERROR, check_shape
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, eventually, serving

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("a", "b")
]


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of the lines of a stream."""
    messages = [line["message"] for line in lines]
    found: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(message["content"] for message in messages),
    }
    if thinking := "".join(message.get("thinking", "") for message in messages):
        found["thinking"] = thinking
    if calls := [call for message in messages for call in message.get("tool_calls", [])]:
        found["tool_calls"] = calls
    return found


async def test_chat_streams_by_default_and_both_forms_have_the_documented_shapes(
    hermes: Served,
) -> None:
    lines = lines_of(await ask(hermes))
    whole = (await ask(hermes, stream=False)).json()
    for line in lines[:-1]:
        check_shape(line, CHAT_PART)
        assert not line["done"]
    for end in (lines[-1], whole):
        check_shape(end, CHAT_END)
        assert (end["done"], end["done_reason"]) == (True, "stop")
        assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] > 0
        assert end["eval_count"] == hermes.engine.stats.step // 2
        assert end["prompt_eval_count"] == len(hermes.engine.requests[0].prompt)
    assert joined(lines) == whole["message"]
    assert whole["message"] == {"role": "assistant", "content": "Yes.", "thinking": "Hm."}


async def test_chat_cut_at_num_predict_says_length(served: Served) -> None:
    whole = (await ask(served, stream=False, options={"num_predict": 3})).json()
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 3)
    for endless in (-1, -2, 0):
        whole = (await ask(served, stream=False, options={"num_predict": endless})).json()
        assert whole["done_reason"] == "stop"


async def test_calls_are_whole_objects_in_one_line_each(
    hermes: Served, says: Callable[[str], Script]
) -> None:
    hermes.engine.script = says(CALLS)
    lines = lines_of(await ask(hermes, tools=TOOLS))
    calls = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [call["function"] for [call] in calls] == [
        {"index": 0, "name": "a", "arguments": {"x": 1.5, "y": "\u2028"}},
        {"index": 1, "name": "b", "arguments": {}},
    ]
    whole = (await ask(hermes, tools=TOOLS, stream=False)).json()
    functions = [call["function"] for call in whole["message"]["tool_calls"]]
    assert functions == [call["function"] for [call] in calls]
    assert whole["done_reason"] == "stop"


async def test_call_that_is_cut_is_left_out(hermes: Served, says: Callable[[str], Script]) -> None:
    hermes.engine.script = says(CALLS)
    first = CALLS.index("</tool_call>") + 40
    whole = (await ask(hermes, tools=TOOLS, stream=False, options={"num_predict": first})).json()
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["a"]
    assert whole["done_reason"] == "length"


async def test_results_without_ids_belong_to_the_calls_in_order(hermes: Served) -> None:
    """Ollama's Python client drops the ids of calls."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
    ]
    shown = template_messages([OllamaMessage.model_validate(message) for message in messages])
    assert [call["id"] for call in shown[1]["tool_calls"]] == [
        "call00000",
        "call00001",
        "call00002",
    ]
    assert [(each["tool_call_id"], each["name"]) for each in shown[2:]] == [
        ("call00001", "b"),
        ("call00000", "a"),
    ]
    assert (await ask(hermes, messages=messages, stream=False)).status_code == 200


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {}}])
async def test_format_is_a_grammar_of_the_answer(served: Served, format: Any) -> None:
    await ask(served, format=format)
    [request] = served.engine.requests
    assert request.params.grammar is not None
    assert request.params.grammar.param == "format"


async def test_null_and_empty_members_are_absent(served: Served) -> None:
    names = ("temperature", "seed", "stop", "num_ctx", "mirostat", "tfs_z", "num_gpu")
    empty = {"options": dict.fromkeys(names), "format": "", "think": None, "keep_alive": ""}
    response = await ask(served, tools=[], **empty)
    assert response.status_code == 200
    assert "x-ignored-params" not in response.headers
    assert served.engine.requests[0].params.grammar is None


@pytest.mark.parametrize(
    ("think", "status"), [(True, 400), ("high", 400), (False, 200), ("none", 200)]
)
async def test_think_needs_a_model_that_thinks(
    served: Served, hermes: Served, think: Any, status: int
) -> None:
    assert (await ask(hermes, think=think)).status_code == 200
    refused = await ask(served, think=think)
    assert refused.status_code == status
    assert status == 200 or "think" in refused.json()["error"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"num_ctx": 513}}, "options.num_ctx"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"format": "yaml"}, "format"),
        ({"truncate": True}, "truncate"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "images": ["iVBORw0KGgo="]}]}, "messages"),
        ({"messages": [], "keep_alive": 0}, "keep_alive"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "512 tokens"),
    ],
)
async def test_chat_refuses_by_name(served: Served, fields: dict[str, Any], name: str) -> None:
    response = await ask(served, **fields)
    assert response.status_code == 400
    check_shape(response.json(), ERROR)
    assert name in response.json()["error"]
    assert not served.engine.requests


async def test_options_reach_the_engine(served: Served) -> None:
    options = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "repeat_penalty": 1.2, "seed": 4}
    more = {"num_ctx": 512, "num_thread": 3, "typical_p": 0.9, "repeat_last_n": -1, "odd": 1}
    response = await ask(served, options={**options, **more, "stop": ["x"]})
    params = served.engine.requests[0].params
    assert (params.temperature, params.top_k, params.min_p) == (0.5, 7, 0.1)
    assert (params.repetition_penalty, params.seed, params.typical_p) == (1.2, 4, 0.9)
    assert response.headers["x-ignored-params"] == "options.odd"


async def test_model_is_known_with_the_tag_latest_and_others_are_not(served: Served) -> None:
    assert lines_of(await ask(served, model="tiny:latest"))[-1]["model"] == "tiny"
    response = await ask(served, model="other:latest")
    assert response.status_code == 404
    assert "other" in response.json()["error"]


async def test_chat_without_messages_says_that_the_model_is_loaded(served: Served) -> None:
    [line] = lines_of(await ask(served, messages=[]))
    assert (line["done"], line["done_reason"]) == (True, "load")
    whole = (await ask(served, messages=[], stream=False, keep_alive=-1)).json()
    assert whole["message"] == {"role": "assistant", "content": ""}
    assert not served.engine.requests


async def test_last_message_of_the_assistant_is_continued(served: Served) -> None:
    await ask(served, messages=[*HI, {"role": "assistant", "content": "Ye"}])
    text = served.app.state.penstock.tokenizer.decode(served.engine.requests[0].prompt)
    assert text.endswith("<assistant>Ye")


async def test_logprobs_have_alternatives(served: Served) -> None:
    whole = (await ask(served, stream=False, logprobs=True, top_logprobs=1)).json()
    check_shape(whole, CHAT_END)
    assert [entry["token"] for entry in whole["logprobs"][:2]] == ["H", "e"]
    assert len(whole["logprobs"][0]["top_logprobs"]) == 1


async def test_silent_stream_gets_lines_without_text(
    model: Path, says: Callable[[str], Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank lines and comments break Ollama's clients."""
    pings: list[bytes] = []
    ping = LinesWriter.ping

    def counted(self: LinesWriter) -> bytes:
        pings.append(ping(self))
        if len(pings) == 2:
            engine.gate.set()
        return pings[-1]

    monkeypatch.setattr(LinesWriter, "ping", counted)
    engine = FakeEngine(says("Yes"))
    engine.gate.clear()
    async with serving(engine, model, ping_interval=0.05) as served:
        lines = lines_of(await ask(served))
    await eventually(lambda: len(pings) > 1, "pings were sent")
    assert pings[0].startswith(b" {")
    for line in lines[:-1]:
        check_shape(line, CHAT_PART)
    assert joined(lines)["content"] == "Yes"


def test_images_come_before_the_text_of_their_message() -> None:
    message = {"role": "user", "content": "What is it?", "images": ["iVBORw0KGgo="]}
    [shown] = template_messages([OllamaMessage.model_validate(message)])
    assert shown["content"] == [
        image_part("data:;base64,iVBORw0KGgo=", None, "messages.images"),
        text_part("What is it?"),
    ]
