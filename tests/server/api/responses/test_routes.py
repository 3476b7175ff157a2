"""/v1/responses over HTTP, with the openai client and by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest

from engine.errors import RequestRejectedError
from tests.server.conftest import BOS
from tests.support.fake_engine import INFO, NOT_FINITE, FakeEngine
from tests.support.openai_spec import OpenAISpec, sse_events
from tests.support.rig import Served, serving

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}


async def create(served: Served, **fields: Any) -> Any:
    """Return the response to a request, which must succeed."""
    response = await served.http.post("/v1/responses", json={"input": "Hi", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def error_of(served: Served, **fields: Any) -> tuple[int, str, str | None]:
    """Return status, code and param of the error that the fields cause."""
    response = await served.http.post("/v1/responses", json={"input": "Hi", **fields})
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def prompt_of(served: Served) -> str:
    """Return the text of the last prompt."""
    ids = served.engine.requests[-1].prompt
    assert ids[0] == BOS
    text: str = served.app.state.penstock.tokenizer.decode(ids[1:])
    return text


# ---- create ----------------------------------------------------------------------------------


async def test_create_openai_client_receives_complete_answer(served, spec: OpenAISpec):
    answer = await served.openai.responses.create(model="tiny", input="Hi")
    assert answer.output_text == "Hello wörld!"
    assert (answer.status, answer.model, answer.object) == ("completed", "tiny", "response")
    assert answer.usage.output_tokens == 14  # 13 bytes and EOS
    assert answer.usage.input_tokens == len(served.engine.requests[0].prompt)
    assert (answer.temperature, answer.top_p) == (0.6, 1.0)  # the checkpoint's
    spec.check("Response", await create(served))


async def test_create_stream_equals_whole_answer(served, spec: OpenAISpec):
    async with served.openai.responses.stream(model="tiny", input="Hi") as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello wörld!"
    response = await served.http.post("/v1/responses", json={"input": "Hi", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    for event in sse_events(response.text):
        spec.check_event(event)


async def test_create_instructions_are_the_system_message(served):
    await create(served, instructions="Be brief.")
    assert prompt_of(served) == "<system>Be brief.\n<user>Hi\n<assistant>"


async def test_create_tools_and_their_results_reach_the_template(served):
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    served.engine.info = msgspec.structs.replace(INFO, max_model_len=4096)
    await create(served, input=[{"role": "user", "content": "1+1"}, call, output], tools=[ADD])
    prompt = prompt_of(served)
    assert '"name": "add"' in prompt
    assert '<assistant><tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert prompt.endswith("<user><tool_response>\n2\n</tool_response>\n<assistant>")


async def test_create_cut_answer_is_incomplete(served):
    body = await create(served, max_output_tokens=3)
    assert (body["status"], body["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    assert body["output"][0]["status"] == "incomplete"


async def test_create_logprobs_of_client_cover_the_text(served, spec: OpenAISpec):
    include = ["message.output_text.logprobs"]
    body = await create(served, include=include, top_logprobs=1)
    spec.check("Response", body)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert bytes(b for entry in logprobs for b in entry["bytes"]).decode() == "Hello wörld!"
    assert all(len(entry["top_logprobs"]) == 1 for entry in logprobs)


async def test_create_names_ignored_fields_in_header(served):
    fields = {"input": "Hi", "tools": [{"type": "web_search"}], "context_management": [], "x": 1}
    response = await served.http.post("/v1/responses", json=fields)
    assert response.headers["x-ignored-params"] == "context_management, x, tools.web_search"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"background": True}, (400, "unsupported_parameter", "background")),
        ({"truncation": "auto"}, (400, "unsupported_parameter", "truncation")),
        ({"conversation": "conv_1"}, (400, "unsupported_parameter", "conversation")),
        ({"prompt": {"id": "p"}}, (400, "unsupported_parameter", "prompt")),
        ({"model": "gpt"}, (404, "model_not_found", "model")),
        ({"input": "x" * 600}, (400, "context_length_exceeded", "input")),
        (
            {"previous_response_id": "resp_1"},
            (404, "previous_response_not_found", "previous_response_id"),
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, (400, "invalid_value", "input")),
        ({"input": [{"type": "item_reference", "id": "a"}]}, (404, "item_not_found", "input.0.id")),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": 1}}},
            (400, "invalid_value", "text.format.strict"),
        ),
    ],
)
async def test_create_error_names_the_field(served, fields, error):
    assert await error_of(served, **fields) == error
    assert not served.engine.requests


async def test_create_background_false_is_accepted(served):
    body = await create(served, background=False, truncation="disabled", conversation=None)
    assert (body["status"], body["background"]) == ("completed", False)


async def test_create_error_of_the_template_names_input(model, says, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ raise_exception('One system message only.') }}")
    async with serving(FakeEngine(says("x")), model, chat_template=str(template)) as served:
        response = await served.http.post("/v1/responses", json={"input": "Hi"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert "One system message only." in error["message"]


async def test_create_model_without_template_names_input(model, says, tmp_path):
    folder = shutil.copytree(model, tmp_path / "bare")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    async with serving(FakeEngine(says("x")), folder) as served:
        assert await error_of(served) == (400, "unsupported_parameter", "input")


async def test_create_rejected_by_the_engine_is_not_stored(served):
    served.engine.reject = RequestRejectedError("invalid_value", "Too odd.", "text.format.schema")
    expected = (400, "invalid_value", "text.format.schema")
    assert await error_of(served) == expected
    assert len(served.app.state.response_store) == 0


async def test_create_failure_in_stream_ends_with_failed_response(model, encode, spec: OpenAISpec):
    script = [*encode("Hello"), NOT_FINITE]
    engine = FakeEngine(lambda request: script, delay=0.01)  # one token an update
    async with serving(engine, model) as served:
        response = await served.http.post("/v1/responses", json={"input": "Hi", "stream": True})
        found = sse_events(response.text)
        for event in found:
            spec.check_event(event)
        assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
        assert found[-2]["code"] == "numerical_error"
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"
        assert len(served.app.state.response_store) == 0


# ---- the store -------------------------------------------------------------------------------


async def test_previous_response_is_continued_without_its_instructions(served):
    first = await create(served, instructions="Be brief.")
    second = await create(served, input="And?", previous_response_id=first["id"])
    assert prompt_of(served) == "<user>Hi\n<assistant>Hello wörld!\n<user>And?\n<assistant>"
    await create(served, input="So?", previous_response_id=second["id"], instructions="Rhyme.")
    assert prompt_of(served) == (
        "<system>Rhyme.\n<user>Hi\n<assistant>Hello wörld!\n<user>And?\n<assistant>Hello wörld!\n"
        "<user>So?\n<assistant>"
    )


async def test_previous_response_keeps_calls_and_their_results(served):
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    first = await create(served, input=[{"role": "user", "content": "1+1"}, call])
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    await create(served, input=[output], previous_response_id=first["id"])
    prompt = prompt_of(served)
    assert '"name": "add"' in prompt
    assert prompt.endswith("<assistant>Hello wörld!\n<tool>2\n<assistant>")


async def test_item_reference_reads_the_stored_item(served):
    first = await create(served, input=[{"role": "user", "content": "One"}])
    items = (await served.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    references = [
        {"type": "item_reference", "id": items[0]["id"]},
        {"id": first["output"][0]["id"]},
    ]
    user = {"role": "user", "content": "Two"}
    second = await create(served, input=[*references, user])
    assert prompt_of(served) == "<user>One\n<assistant>Hello wörld!\n<user>Two\n<assistant>"
    # The items are kept with the response that refers to them.
    await served.http.delete(f"/v1/responses/{first['id']}")
    await create(served, input="Three", previous_response_id=second["id"])
    assert prompt_of(served).startswith("<user>One\n<assistant>Hello wörld!\n<user>Two\n")


async def test_retrieve_returns_the_response_as_it_was_sent(served):
    whole = await served.http.post("/v1/responses", json={"input": "Hi"})
    stored = await served.http.get(f"/v1/responses/{whole.json()['id']}")
    assert stored.content == whole.content
    fields = {"input": "Hi", "stream": True}
    found = sse_events((await served.http.post("/v1/responses", json=fields)).text)
    stored = await served.http.get(f"/v1/responses/{found[0]['response']['id']}")
    assert stored.json() == found[-1]["response"]


async def test_openai_client_retrieves_lists_and_deletes(served):
    responses = served.openai.responses
    answer = await responses.create(model="tiny", input="Hi")
    assert (await responses.retrieve(answer.id)).output_text == "Hello wörld!"
    page = await responses.input_items.list(answer.id)
    assert [item.content[0].text for item in page.data] == ["Hi"]
    with pytest.raises(openai.BadRequestError, match="Only a background response") as refused:
        await responses.cancel(answer.id)
    assert refused.value.param == "response_id"
    await responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError) as error:
        await responses.retrieve(answer.id)
    assert error.value.code == "response_not_found"


async def test_delete_says_what_was_deleted(served):
    answer = await create(served)
    path = f"/v1/responses/{answer['id']}"
    expected = {"id": answer["id"], "object": "response", "deleted": True}
    assert (await served.http.delete(path)).json() == expected
    assert (await served.http.delete(path)).status_code == 404


async def test_deleted_response_cannot_be_continued(served):
    first = await create(served)
    second = await create(served, previous_response_id=first["id"])
    await served.http.delete(f"/v1/responses/{first['id']}")
    response = await served.http.post(
        "/v1/responses", json={"input": "x", "previous_response_id": second["id"]}
    )
    assert response.status_code == 404
    assert first["id"] in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "suffix"),
    [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")],
)
async def test_unknown_response_is_404(served, method, suffix):
    response = await served.http.request(method, f"/v1/responses/resp_x{suffix}")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "response_not_found")
    assert error["param"] == "response_id"


async def test_websocket_is_refused_with_the_reason(served):
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    response = await served.http.get("/v1/responses", headers=upgrade)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "WebSocket" in response.json()["error"]["message"]


async def test_compaction_item_is_refused_by_its_place(served):
    items = [{"type": "compaction", "encrypted_content": "x"}, {"role": "user", "content": "Hi"}]
    assert await error_of(served, input=items) == (400, "unsupported_parameter", "input.0")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instructions": "Be brief."},
        {"tools": [ADD]},
        {
            "input": [
                {"type": "additional_tools", "role": "developer", "tools": [ADD]},
                {"role": "user", "content": "Hi"},
            ]
        },
    ],
)
async def test_input_tokens_are_those_of_the_prompt(served, fields):
    served.engine.info = msgspec.structs.replace(INFO, max_model_len=4096)
    body = {"input": "Hi", **fields}
    counted = (await served.http.post("/v1/responses/input_tokens", json=body)).json()
    await create(served, **fields)
    number = len(served.engine.requests[-1].prompt)
    assert counted == {"object": "response.input_tokens", "input_tokens": number}


async def test_input_tokens_of_a_missing_response_is_a_404(served):
    body = {"input": "Hi", "previous_response_id": "resp_1"}
    response = await served.http.post("/v1/responses/input_tokens", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (
        404,
        "previous_response_id",
    )


async def test_compaction_is_a_404_that_says_so(served):
    response = await served.http.post("/v1/responses/compact", json={"input": "Hi"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert "compacted" in error["message"]


async def test_store_false_stores_nothing(served):
    answer = await create(served, store=False)
    assert answer["store"] is False
    assert (await served.http.get(f"/v1/responses/{answer['id']}")).status_code == 404


@pytest.mark.parametrize("flag", ["response_store_bytes", "response_store_count"])
async def test_store_of_size_0_stores_nothing(model, says, flag):
    async with serving(FakeEngine(says("x")), model, **{flag: 0}) as served:
        answer = await create(served, store=True)
        assert answer["store"] is False
        assert (await served.http.get(f"/v1/responses/{answer['id']}")).status_code == 404


async def test_streamed_response_cannot_be_streamed_again(served):
    answer = await create(served)
    response = await served.http.get(f"/v1/responses/{answer['id']}?stream=true")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
    for off in ("false", "False", "0"):
        path = f"/v1/responses/{answer['id']}?stream={off}"
        assert (await served.http.get(path)).status_code == 200


@pytest.fixture
async def two_keys(model, says) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("x")), model, key="alpha", api_key=("alpha", "beta")) as two:
        yield two


async def test_other_key_cannot_read_continue_or_delete_a_response(two_keys):
    answer = await create(two_keys)
    path = f"/v1/responses/{answer['id']}"
    other = {"authorization": "Bearer beta"}
    for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        response = await two_keys.http.request(method, path + suffix, headers=other)
        assert response.status_code == 404
    for fields in (
        {"input": "x", "previous_response_id": answer["id"]},
        {"input": [{"type": "item_reference", "id": answer["output"][0]["id"]}]},
    ):
        response = await two_keys.http.post("/v1/responses", json=fields, headers=other)
        assert response.status_code == 404
    assert (await two_keys.http.get(path)).json() == answer


# ---- input_items -----------------------------------------------------------------------------


async def test_input_items_are_the_whole_input_in_openai_format(served, spec: OpenAISpec):
    given = [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": "1+1"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    first = await create(served, input=given)
    second = await create(served, input="And?", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    body = (await served.http.get(path, params={"order": "asc"})).json()
    spec.check("ResponseItemList", body)
    kinds = [item["type"] for item in body["data"]]
    assert kinds == [*(item.get("type", "message") for item in given), "message", "message"]
    assert body["data"][6] == first["output"][0]
    assert body["data"][7]["content"] == [{"type": "input_text", "text": "And?"}]
    assert len({item["id"] for item in body["data"]}) == 8
    latest_first = (await served.http.get(path)).json()["data"]
    assert latest_first == body["data"][::-1]


async def test_input_items_are_paged(served):
    texts = [str(number) for number in range(25)]
    answer = await create(served, input=[{"role": "user", "content": text} for text in texts])
    pages = await served.openai.responses.input_items.list(answer["id"], order="asc", limit=10)
    found = [item.content[0].text async for item in pages]
    assert found == texts


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=١", "limit"),
        ("order=up", "order"),
        ("after=msg_x", "after"),
    ],
)
async def test_input_items_invalid_query_is_refused_by_name(served, query, param):
    answer = await create(served)
    response = await served.http.get(f"/v1/responses/{answer['id']}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
