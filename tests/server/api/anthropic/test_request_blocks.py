"""Which blocks a message may have: by its role, and how many."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.anthropic.request_blocks import MAX_BLOCKS
from tests.support.rig import Served

BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "a"},
    "thinking": {"type": "thinking", "thinking": "a"},
    "redacted_thinking": {"type": "redacted_thinking", "data": "x"},
    "tool_use": {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    "tool_result": {"type": "tool_result", "tool_use_id": "c"},
}
# Anthropic's reference, Messages: the user sends results, the assistant sends calls and thoughts.
ALLOWED = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}


HELLO = {"role": "user", "content": "Hi"}


async def count(served: Served, **fields: Any) -> Any:
    """Return the answer of the route that reads messages and generates nothing."""
    body = {"model": "tiny", **fields}
    return await served.http.post("/v1/messages/count_tokens", json=body)


def conversation(role: str, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with one of `role` between a call and a last message."""
    first = {"role": "assistant", "content": [BLOCKS["tool_use"]]}
    return [first, {"role": role, "content": content}, HELLO]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("role", ALLOWED)
async def test_message_takes_the_blocks_of_its_role_only(
    served: Served, role: str, kind: str
) -> None:
    content = [BLOCKS["text"], BLOCKS[kind]]
    answer = await count(served, messages=conversation(role, content))
    if kind in ALLOWED[role]:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"a message of role {role} has no blocks of type {kind}" in message
    assert "messages.1.content.1.type" in message


@pytest.mark.parametrize("kind", ["thinking", "tool_use", "tool_result"])
async def test_result_and_system_prompt_take_texts_only(served: Served, kind: str) -> None:
    result = BLOCKS["tool_result"] | {"content": [BLOCKS["text"], BLOCKS[kind]]}
    for fields in (
        {"messages": conversation("user", [result])},
        {"messages": [HELLO], "system": [BLOCKS["text"], BLOCKS[kind]]},
    ):
        answer = await count(served, **fields)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert f"blocks of type {kind!r} are not supported here, only text" in message


async def test_request_without_messages_is_refused(served: Served) -> None:
    answer = await count(served, messages=[])
    assert answer.status_code == 400
    assert "messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 400)])
async def test_blocks_of_all_messages_have_a_limit(served: Served, more: int, status: int) -> None:
    """Texts inside results count, too."""
    result = BLOCKS["tool_result"] | {"content": [BLOCKS["text"]] * 1000}
    texts = [BLOCKS["text"]] * (MAX_BLOCKS - 1 - 1001 + more)
    answer = await count(served, messages=conversation("user", [result, *texts]))
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 400)])
async def test_blocks_of_the_system_prompt_have_a_limit(
    served: Served, more: int, status: int
) -> None:
    system = [BLOCKS["text"]] * (MAX_BLOCKS + more)
    answer = await count(served, messages=[HELLO], system=system)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(("length", "status"), [(256, 200), (257, 400)])
async def test_names_and_ids_of_calls_have_a_limit(
    served: Served, length: int, status: int
) -> None:
    for field in ("id", "name"):
        block = BLOCKS["tool_use"] | {field: "n" * length}
        answer = await count(served, messages=[{"role": "assistant", "content": [block]}, HELLO])
        assert answer.status_code == status, answer.text
