"""/v1/messages and its count_tokens over HTTP: what reaches the engine, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.anthropic.test_writer import client_message, named_events
from tests.server.conftest import BOS, EOS
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, serving

USER = {"role": "user", "content": "Hi"}
COUNT = "/v1/messages/count_tokens"
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}


async def prompt_of(served: Served, **fields: Any) -> str:
    response = await served.message(**fields)
    assert response.status_code == 200, response.text
    ids = served.engine.requests[-1].prompt
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    return served.app.state.penstock.tokenizer.decode(ids[1:])


async def test_messages_answer_is_complete(served):
    response = await served.message()
    message = response.json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello wörld!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": len(served.engine.requests[0].prompt),
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 14,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
            "service_tier": "standard",
            "inference_geo": "not_available",
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert "x-ignored-params" not in response.headers


@pytest.mark.parametrize("burst", [1, 5, 100])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}, {"stop_sequences": ["zz", "rld"]}])
async def test_messages_stream_is_equal_to_whole_answer(served, burst, fields):
    served.engine.burst = burst
    served.engine.cached_tokens = 16
    whole = (await served.message(**fields)).json()
    response = await served.message(stream=True, **fields)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    message = client_message(named_events(response.content))
    del whole["id"], message["id"]
    assert message == whole
    assert whole["usage"]["cache_read_input_tokens"] == 16


async def test_messages_stream_has_expected_events(served):
    served.engine.burst = 100
    response = await served.message(stream=True)
    assert [name for name, _ in named_events(response.content)] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert b"[DONE]" not in response.content


async def test_messages_report_the_stop_sequence_that_matched(served):
    message = (await served.message(stop_sequences=["xyz", "wör", "rld"])).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "wör")
    assert message["content"] == [{"type": "text", "text": "Hello "}]
    message = (await served.message(max_tokens=3)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)


async def test_messages_stop_sequence_at_the_start_leaves_no_block(served):
    message = (await served.message(stop_sequences=["Hello"])).json()
    assert message["content"] == []
    assert message["stop_sequence"] == "Hello"


async def test_blocks_of_an_answer_can_be_sent_back(served):
    answer = (await served.message()).json()
    call = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
    blocks = [*answer["content"], call | {"caller": {"type": "direct"}}]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "1"}
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    response = await served.message(messages=[USER, *turns])
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers


async def test_messages_parameters_reach_the_engine(served):
    fields = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 3}
    assert (await served.message(**fields)).status_code == 200
    params = served.engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.5, 0.25, 3)
    assert params.stop_token_ids == (EOS,)
    assert (await served.message(temperature=2)).status_code == 200


async def test_messages_are_rendered_by_the_chat_template(served):
    block = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    prompt = await prompt_of(
        served, system=[{"type": "text", "text": "Be"}], messages=[{**USER, "content": [block]}]
    )
    assert prompt == "<system>Be\n<user>Hi\n<assistant>"
    prompt = await prompt_of(served, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert prompt == "<user>Hi\n<assistant>It is"
    assert (await prompt_of(served, thinking={"type": "enabled"})).endswith("<think>")
    assert not (await prompt_of(served, thinking={"type": "disabled"})).endswith("<think>")


async def test_messages_with_different_billing_headers_have_one_prompt(served):
    def system(nonce: str) -> list[dict[str, str]]:
        header = f"x-anthropic-billing-header: cc_version=2; cch={nonce};"
        return [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]

    first = await prompt_of(served, system=system("1a2"))
    assert await prompt_of(served, system=system("f9e")) == first
    assert "billing" not in first


async def test_messages_accept_what_clients_send_and_name_what_is_ignored(served):
    response = await served.message(
        metadata={"user_id": "a"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high"},
        context_management={"edits": []},
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    )
    assert response.status_code == 200
    ignored = set(response.headers["x-ignored-params"].split(", "))
    assert ignored == {"context_management", "thinking.display", "reasoning_effort"}


async def test_messages_output_format_is_a_grammar(served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    assert (await served.message(output_config={"format": form})).status_code == 200
    grammar = served.engine.requests[-1].params.grammar
    assert grammar.param == "output_config.format.schema"
    assert '"integer"' in grammar.source


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: "),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "'document'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "source.type: ",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type: "),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}},
        "tool_choice.name: ",
    ),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
    ({"output_format": {}}, "Use output_config.format."),
    ({"messages": [USER] * 100 + [{**USER, "content": "a" * 600}]}, "messages"),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                },
            ]
        },
        "The last message cannot be continued",
    ),
]


@pytest.mark.parametrize("path", ["/v1/messages", COUNT])
@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:30])
async def test_messages_refusals_have_the_format_of_the_api(served, path, fields, message):
    if path == COUNT and ("max_tokens" in fields or message == "messages"):
        return  # no field of this route; a count may exceed the context
    body = {"max_tokens": 5, "messages": [USER], **fields}
    response = await served.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert message in response.json()["error"]["message"]


async def test_messages_too_many_blocks_are_refused(served):
    results = [{"type": "text", "text": ""}] * 5000
    block = {"type": "tool_result", "tool_use_id": "1", "content": results}
    response = await served.message(messages=[{"role": "user", "content": [block]}])
    assert response.status_code == 400
    assert "4096 blocks in total" in response.json()["error"]["message"]


async def test_messages_unknown_model_and_method_and_path_have_the_format_of_the_api(served):
    response = await served.message(model="claude")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert "'claude'" in response.json()["error"]["message"]
    assert (await served.http.get("/v1/messages")).status_code == 405
    response = await served.http.post("/v1/v1/messages", json={})
    assert response.status_code == 404
    hint = "did you mean /v1/messages? Anthropic's clients add /v1 to the base URL."
    assert hint in response.json()["error"]["message"]
    assert (await served.http.post("/v1/messages/batches", json={})).status_code == 404


async def test_messages_need_the_key_of_either_header(model, says):
    async with serving(FakeEngine(says("x")), model, api_key=("alpha",)) as served:
        response = await served.message()
        assert response.status_code == 401
        assert "x-api-key" in response.json()["error"]["message"]
        served.http.headers["x-api-key"] = "alpha"
        served.http.headers["anthropic-version"] = "2023-06-01"
        assert (await served.message()).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        {"tools": [WEATHER]},
    ],
)
async def test_count_tokens_is_the_length_of_the_prompt(served, fields):
    response = await served.http.post(COUNT, json={"messages": [USER], **fields})
    assert response.status_code == 200
    assert list(response.json()) == ["input_tokens"]
    assert (await served.message(**fields)).status_code == 200
    assert response.json()["input_tokens"] == len(served.engine.requests[-1].prompt)


async def test_count_tokens_counts_more_than_the_context(served):
    body = {"messages": [{"role": "user", "content": "a" * 20_000}], "top_k": 3}
    response = await served.http.post(COUNT, json=body)
    assert response.json()["input_tokens"] == 20_000 + len("<user>\n<assistant>") + 1
    assert response.headers["x-ignored-params"] == "top_k"
    assert not served.engine.requests
