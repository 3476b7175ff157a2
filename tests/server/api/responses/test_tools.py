"""Tools of /v1/responses: custom ones, namespaces, searches, and the items that bring tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tests.support.fake_engine import INFO, FakeEngine
from tests.support.openai_spec import OpenAISpec, sse_events
from tests.support.rig import Served, serving

LARK = 'start: "*** Begin" LF /[a-z]+/ LF?\n%import common.LF\n'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": LARK}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Edit.",
    "format": GRAMMAR,
}
PLAIN: dict[str, Any] = {"type": "custom", "name": "run"}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "close"}, {**PLAIN, "name": "say"}],
}
SEARCH: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
HELD = '<tool_call>\n{"name": "patch", "arguments":\n*** Begin\nab "\\n'
LARGE = msgspec.structs.replace(INFO, max_model_len=4096)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def answer(model: Path, script: Any, **fields: Any) -> tuple[Any, list[Any], Served]:
    """Return the response, the events of the same one as a stream, and the server."""
    engine = FakeEngine(script)
    engine.info = LARGE
    body = {"input": "Hi", **fields}
    async with serving(engine, model) as served:
        whole = await served.http.post("/v1/responses", json=body)
        assert whole.status_code == 200, whole.text
        stream = await served.http.post("/v1/responses", json={**body, "stream": True})
        return whole.json(), sse_events(stream.text), served


async def refusal(served: Served, **fields: Any) -> tuple[int, str]:
    response = await served.http.post("/v1/responses", json={"input": "Hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def prompt_of(served: Served) -> str:
    text: str = served.app.state.penstock.tokenizer.decode(served.engine.requests[-1].prompt)
    return text


def shown(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item without its ids."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("tool", "says_text", "written"),
    [
        (PATCH, HELD, '*** Begin\nab "\\n'),
        (PLAIN, called("run", input='a "b"\n'), 'a "b"\n'),
        (PLAIN, called("run", code="x"), "x"),
    ],
)
async def test_custom_tool_call_is_an_item_with_the_input(
    model: Path, says, spec: OpenAISpec, tool, says_text, written
) -> None:
    body, events, _ = await answer(model, says(says_text), tools=[tool])
    expected = {"type": "custom_tool_call", "status": "completed", "name": tool["name"]}
    assert [shown(item) for item in body["output"]] == [{**expected, "input": written}]
    spec.check("Response", body)
    for event in events:
        spec.check_event(event)
    assert [shown(item) for item in events[-1]["response"]["output"]] == [
        shown(item) for item in body["output"]
    ]
    inner = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert "".join(event.get("delta", "") for event in inner) == written
    assert inner[-1]["type"].endswith(".done")
    assert inner[-1]["input"] == written
    assert body["tools"][0]["name"] == tool["name"]


async def test_cut_custom_tool_call_is_incomplete(model: Path, says) -> None:
    body, events, _ = await answer(
        model, says(HELD), tools=[PATCH], max_output_tokens=len(HELD) - 4
    )
    for response in (body, events[-1]["response"]):
        assert response["status"] == "incomplete"
        (item,) = response["output"]
        assert (item["status"], item["input"]) == ("incomplete", "*** Begin\nab")
    assert events[-1]["type"] == "response.incomplete"


async def test_grammar_holds_the_input_in_every_mode(model: Path, says) -> None:
    for choice in ("auto", "required", {"type": "custom", "name": "patch"}):
        _, _, served = await answer(model, says("x"), tools=[PATCH, ADD], tool_choice=choice)
        grammar = served.engine.requests[-1].params.grammar
        assert grammar is not None
        assert "%lark" in grammar.source
        assert json.dumps(LARK)[1:-1] in prompt_of(served)
    _, _, served = await answer(model, says("x"), tools=[PATCH, ADD], tool_choice="none")
    assert served.engine.requests[-1].params.grammar is None


async def test_calls_and_outputs_of_a_history_reach_the_template(model: Path, says) -> None:
    items = [
        {"role": "user", "content": "Do it."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"\n'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Exit code: 0"},
        {"type": "function_call", "call_id": "c2", "name": "close", "namespace": "agents",
         "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "Seen:"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
        ]},
    ]  # fmt: skip
    _, _, served = await answer(model, says("Hello"), input=items, tools=[PATCH, AGENTS])
    prompt = prompt_of(served)
    assert '{"name": "patch", "arguments": {"input": "a \\"b\\"\\n"}}' in prompt
    assert "Exit code: 0" in prompt
    assert '{"name": "agents__close", "arguments": {}}' in prompt
    assert "Seen:\n[An image was left out: this model reads text only.]" in prompt


async def test_left_out_images_are_named_in_the_header(served: Served) -> None:
    output = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    response = await served.http.post("/v1/responses", json={"input": [item]})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "input.output.input_image"
    page = await served.http.get(f"/v1/responses/{response.json()['id']}/input_items")
    assert page.json()["data"][0]["output"][0]["type"] == "input_image"


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("agents__close", {"id": 1}, {"type": "function_call", "arguments": '{"id": 1}'}),
        ("agents__say", {"input": "Hi"}, {"type": "custom_tool_call", "input": "Hi"}),
    ],
)
async def test_call_in_a_namespace_names_it_in_its_own_field(
    model: Path, says, spec: OpenAISpec, name, arguments, expected
) -> None:
    body, events, served = await answer(model, says(called(name, **arguments)), tools=[AGENTS])
    (item,) = body["output"]
    inner = name.removeprefix("agents__")
    assert shown(item) == {**expected, "status": "completed", "namespace": "agents", "name": inner}
    assert f'"name": "{name}"' in prompt_of(served)
    spec.check("Response", body)
    for event in events:
        spec.check_event(event)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("close", ("agents", "close")),
        ("agents.close", ("agents", "close")),
        ("open", (None, "open")),
    ],
)
async def test_inner_name_of_a_function_in_a_namespace_is_understood(
    model: Path, says, written, expected
) -> None:
    body, _, _ = await answer(model, says(called(written)), tools=[AGENTS])
    (item,) = body["output"]
    assert (item.get("namespace"), item["name"]) == expected


@pytest.mark.variants(1)
async def test_search_of_a_client_hides_tools_and_is_called(
    model: Path, says, spec: OpenAISpec
) -> None:
    tools = [SEARCH, ADD, {**AGENTS, "tools": [{**AGENTS["tools"][0], "defer_loading": True}]}]
    text = called("tool_search", q="agents")
    body, events, served = await answer(model, says(text), tools=tools)
    (item,) = body["output"]
    assert shown(item) == {
        "type": "tool_search_call",
        "status": "completed",
        "execution": "client",
        "arguments": {"q": "agents"},
    }
    assert item["call_id"]
    prompt = prompt_of(served)
    assert '"name": "agents__close"' not in prompt
    assert "agents: Other agents." in prompt
    spec.check("Response", body)
    for event in events:
        spec.check_event(event)
    assert [e["type"] for e in events[2:-1]] == [
        "response.output_item.added",
        "response.output_item.done",
    ]


async def test_tools_that_a_search_has_found_can_be_called_later(model: Path, says) -> None:
    close = {**AGENTS["tools"][0], "defer_loading": True}
    found = {**AGENTS, "tools": [close]}
    engine = FakeEngine(says(called("agents__close")))
    engine.info = LARGE
    call = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}}
    output = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [found]}
    async with serving(engine, model) as served:
        body: dict[str, Any] = {"input": [call, output], "tools": [SEARCH]}
        first = (await served.http.post("/v1/responses", json=body)).json()
        assert first["output"][0]["namespace"] == "agents"
        assert "Found tools, which can be called now: agents__close" in prompt_of(served)
        more = {"input": "Again", "tools": [SEARCH], "previous_response_id": first["id"]}
        more["tool_choice"] = {"type": "function", "name": "close"}
        later = await served.http.post("/v1/responses", json=more)
        assert later.status_code == 200, later.text
        assert later.json()["output"][0]["name"] == "close"
        items = await served.http.get(f"/v1/responses/{first['id']}/input_items?order=asc")
        assert items.json()["data"][1]["tools"][0]["tools"][0]["name"] == "close"


async def test_search_of_the_server_shows_all_tools_at_once(model: Path, says) -> None:
    tools = [{"type": "tool_search"}, {**ADD, "defer_loading": True}]
    body, _, served = await answer(model, says("Hello"), tools=tools)
    assert '"name": "add"' in prompt_of(served)
    assert '"name": "tool_search"' not in prompt_of(served)
    assert body["tools"][0] == {"type": "tool_search", "execution": "server"}


async def test_additional_tools_of_the_input_are_tools(model: Path, says) -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [AGENTS, PATCH]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    choice = {"type": "custom", "name": "patch"}
    body, _, served = await answer(model, says(HELD), input=items, tool_choice=choice)
    assert body["output"][0]["name"] == "patch"
    assert body["tools"] == []
    prompt = prompt_of(served)
    assert '"name": "agents__close"' in prompt
    assert "Be brief." in prompt.partition("<user>")[0]


async def test_allowed_tools_may_be_custom_or_a_namespace(model: Path, says) -> None:
    entries = [{"type": "custom", "name": "run"}, {"type": "namespace", "name": "agents"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": entries}
    tools = [PLAIN, PATCH, AGENTS]
    _, _, served = await answer(model, says(called("run")), tools=tools, tool_choice=choice)
    prompt = prompt_of(served)
    assert '"name": "run"' in prompt
    assert '"name": "agents__say"' in prompt
    assert '"name": "patch"' not in prompt


@pytest.mark.variants(5)
@pytest.mark.parametrize(
    ("fields", "param", "says_text"),
    [
        ({"tools": [{**PATCH, "format": {**GRAMMAR, "syntax": "gbnf"}}]},
         "tools.0.format.syntax", "lark"),
        ({"tools": [{**PATCH, "format": {"type": "json"}}]}, "tools.0.format", "text or grammar"),
        ({"tools": [{**PATCH, "format": {**GRAMMAR, "definition": "start: <|eot|>"}}]},
         "tools", "the custom tool 'patch': line 1: <|eot|>"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "run"}},
         "tool_choice.name", "custom tool"),
        ({"tools": [PATCH], "tool_choice": {"type": "function", "name": "patch"}},
         "tool_choice.name", "function"),
        ({"tools": [{**AGENTS, "tools": []}]}, "tools.0.tools", "at least 1"),
        ({"tools": [{**AGENTS, "tools": [SEARCH]}]}, "tools.0.tools.0", "function or custom"),
        ({"tools": [AGENTS, {**ADD, "name": "agents__close"}]}, "tools", "agents__close"),
        ({"tools": [{**ADD, "name": "tool_search"}, SEARCH]}, "tools", "tool_search"),
        ({"tools": [ADD], "tool_choice": {"type": "image_generation"}}, "tool_choice", "no tools"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input.0", "additional_tools"),
        ({"input": [{"type": "function_call_output", "call_id": "c",
                     "output": [{"type": "input_audio"}]}]}, "input.0.output.0.type", "only parts"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_refused_by_name(
    served: Served, fields, param, says_text
) -> None:
    found, message = await refusal(served, **fields)
    assert found == param
    assert says_text in message
    assert not served.engine.requests


async def test_client_types_read_custom_calls(model: Path, says) -> None:
    engine = FakeEngine(says(HELD))
    engine.info = LARGE
    async with serving(engine, model) as served:
        tools: Any = [PATCH]
        async with served.openai.responses.stream(model="tiny", input="Hi", tools=tools) as stream:
            kinds = [type(event).__name__ async for event in stream]
            final = await stream.get_final_response()
    assert "ResponseCustomToolCallInputDeltaEvent" in kinds
    (item,) = final.output
    assert isinstance(item, openai.types.responses.ResponseCustomToolCall)
    assert item.input == '*** Begin\nab "\\n'
