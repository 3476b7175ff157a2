"""From the items of requests and responses to the messages of a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.responses.conversation import messages_of
from server.api.responses.ids import new_response_id
from server.api.responses.schemas import ResponsesBody
from server.api.responses.store import ResponseStore
from server.api.responses.turn import StoredItems, read_turn
from server.http.errors import ApiError
from server.text.content_parts import text_parts

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
TEMPLATE_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
}


def messages(given: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    body = ResponsesBody.model_validate({"input": given, "instructions": instructions})
    stored = StoredItems(ResponseStore(0, 0), "")
    return read_turn(body, new_response_id(), [], stored).messages


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Hi", [USER]),
        ([USER], [USER]),
        ([{**USER, "type": "message", "id": None, "status": None}], [USER]),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_text", "text": "b"},
                    ],
                }
            ],
            [{"role": "user", "content": text_parts(["a", "b"])}],
        ),
        (
            [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
            [USER, assistant("No."), USER],
        ),
        (
            [
                USER,
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "Yo", "annotations": [], "logprobs": []}
                    ],
                },
            ],
            [USER, assistant("Yo")],
        ),
        # The items of one turn of the assistant are one message.
        (
            [USER, THOUGHT, {"role": "assistant", "content": "Yo"}, CALL, OUTPUT],
            [
                USER,
                assistant("Yo", reasoning_content="Hm", tool_calls=[TEMPLATE_CALL]),
                RESULT,
            ],
        ),
        (
            [USER, CALL, CALL | {"call_id": "c2"}, OUTPUT],
            [
                USER,
                assistant(None, tool_calls=[TEMPLATE_CALL, TEMPLATE_CALL | {"id": "c2"}]),
                RESULT,
            ],
        ),
        # A text after calls, or a thought after a text, begins another message.
        (
            [CALL, {"role": "assistant", "content": "Yo"}, THOUGHT],
            [
                assistant(None, tool_calls=[TEMPLATE_CALL]),
                assistant("Yo"),
                assistant("", reasoning_content="Hm"),
            ],
        ),
        ([THOUGHT, THOUGHT], [assistant("", reasoning_content="Hm\nHm")]),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short"}]}],
            [assistant("", reasoning_content="Short")],
        ),
        ([USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}], [USER]),
        (
            [OUTPUT | {"output": [{"type": "input_text", "text": "2"}]}],
            [{"role": "tool", "content": "2", "tool_call_id": "c1"}],
        ),
    ],
)
def test_messages_of_items(given: Any, expected: list[dict[str, Any]]) -> None:
    assert messages(given) == expected


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    [message] = messages([CALL | {"arguments": '{"a": '}])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_instructions_and_leading_system_messages_are_one_message() -> None:
    developer = {"role": "developer", "content": "Rules"}
    system = {"role": "system", "content": "More"}
    expected = [{"role": "system", "content": "Be brief.\n\nRules\n\nMore"}, USER]
    assert messages([developer, system, USER], "Be brief.") == expected
    assert messages("Hi", "Be brief.") == [{"role": "system", "content": "Be brief."}, USER]
    assert messages([USER, developer]) == [USER, developer]
    assert messages([USER], "") == [USER]


def test_messages_of_nothing_are_none() -> None:
    assert messages_of([], None) == []


@pytest.mark.parametrize("item_id", ["msg_1", f"msg_{'0' * 32}_0", "", "rs_x_0"])
def test_reference_to_unknown_item_is_404(item_id: str) -> None:
    with pytest.raises(ApiError) as error:
        messages([USER, {"type": "item_reference", "id": item_id}])
    assert (error.value.status, error.value.code) == (404, "item_not_found")
    assert error.value.param == "input.1.id"
