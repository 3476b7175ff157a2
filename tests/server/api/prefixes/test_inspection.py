"""Cache diagnostics of /v1/responses and /v1/messages over HTTP, and how prompts are remembered."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from engine.protocol.generate import Image
from server.api.prefixes import inspection
from server.api.prefixes.record import PromptRecord, num_shared_blocks, prompt_record
from server.api.tenant_store import TenantStore
from server.generation.chat_prompt import Chat
from server.images.shown import ImageTokens, ReadImage, ShownImages
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

LONG = "The river runs past the old mill and the three boats."
USER = {"role": "user", "content": LONG}
KEYS = ("sk-11111111", "sk-22222222")
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def room_for_tools(served: Served) -> None:
    served.engine.info = msgspec.structs.replace(INFO, max_model_len=4096)


async def respond(served: Served, compared: str | None = None, **fields: Any) -> Json:
    options = {} if compared is None else {"comparison_response_id": compared}
    body = {"input": [USER], "instructions": LONG, "prompt_cache_options": options, **fields}
    response = await served.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def reason_of(served: Served, compared: str | None, **fields: Any) -> Any:
    """Return the reason of a miss in the answer to a message; None without one."""
    diagnostics = {"previous_message_id": compared}
    answer = (await served.message(diagnostics=diagnostics, **fields)).json()
    found = answer["diagnostics"]
    return None if found is None else found["cache_miss_reason"]


async def test_response_says_what_the_first_different_block_holds(served: Served) -> None:
    first = await respond(served)
    assert "prompt_cache_diagnostics" not in first
    before = served.engine.requests[-1].prompt
    second = await respond(served, first["id"], instructions=LONG.replace("old", "new"))
    block = (1 + len("<system>") + LONG.index("old")) // 16  # behind BOS
    assert second["prompt_cache_diagnostics"] == {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": (len(before) - 1) // 16 * 16 - block * 16,
        "comparison_reusable_tokens": block * 16,
        "first_different_block": block,
        "held": "system",
    }


@pytest.mark.parametrize(
    ("fields", "reason", "held"),
    [
        ({"tools": [{"type": "function", "name": "f"}]}, "tools_changed", "tools"),
        ({"input": [{**USER, "content": "A " + LONG}]}, "input_changed", "input.0"),
        ({"cache_salt": "x"}, "prompt_cache_key_changed", "cache_salt"),
    ],
)
async def test_response_has_the_reason_in_openai_words(
    served: Served, fields: Json, reason: str, held: str
) -> None:
    first = await respond(served)
    found = (await respond(served, first["id"], **fields))["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"], found["held"]) == ("cache_miss", reason, held)


async def test_response_of_a_continued_conversation_names_its_own_item(served: Served) -> None:
    first = await respond(served)
    items = [USER, {"role": "assistant", "content": LONG}, USER]
    second = await respond(served, previous_response_id=first["id"], input=items)
    items = [USER, {"role": "assistant", "content": LONG + "x"}, USER]
    third = await respond(
        served, second["id"], previous_response_id=first["id"], input=items, store=False
    )
    assert third["prompt_cache_diagnostics"]["held"] == "input.1"


async def test_response_of_another_conversation_names_a_message_before_the_input(
    served: Served,
) -> None:
    first, other = await respond(served), await respond(served, input=[{**USER, "content": "Hi"}])
    second = await respond(served, previous_response_id=first["id"])
    third = await respond(served, second["id"], previous_response_id=other["id"])
    assert third["prompt_cache_diagnostics"]["held"] == "messages.1"


@pytest.mark.parametrize(("cached", "kind"), [(32, "cache_hit"), (0, "unavailable")])
async def test_response_to_an_equal_prompt_is_a_hit_while_the_cache_has_it(
    served: Served, cached: int, kind: str
) -> None:
    first = await respond(served)
    served.engine.cached_tokens = cached
    assert (await respond(served, first["id"]))["prompt_cache_diagnostics"]["type"] == kind


async def test_response_stream_has_the_diagnostics_of_the_whole_answer(served: Served) -> None:
    first = await respond(served)
    body = {
        "input": "Hi",
        "instructions": LONG[1:],
        "prompt_cache_options": {"comparison_response_id": first["id"]},
    }
    whole = (await served.http.post("/v1/responses", json=body)).json()
    stream = await served.openai.responses.create(
        model="tiny",
        input="Hi",
        instructions=LONG[1:],
        stream=True,
        extra_body={"prompt_cache_options": body["prompt_cache_options"]},
    )
    last = [event async for event in stream][-1].response
    assert last.model_dump()["prompt_cache_diagnostics"] == whole["prompt_cache_diagnostics"]


async def test_unknown_ids_are_named_as_not_found(served: Served) -> None:
    found = (await respond(served, "resp_none"))["prompt_cache_diagnostics"]
    assert found == {"type": "comparison_response_not_found"}
    assert await reason_of(served, "msg_none") == {"type": "previous_message_not_found"}


async def test_message_without_an_earlier_one_has_no_reason(served: Served) -> None:
    assert await reason_of(served, None) is None
    assert "diagnostics" not in (await served.message()).json()


@pytest.mark.parametrize(
    ("fields", "kind", "held"),
    [
        ({"system": "A " + LONG}, "system_changed", "system"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools_changed", "tools"),
        ({"messages": [{**USER, "content": LONG[4:]}]}, "messages_changed", "messages.0"),
    ],
)
async def test_message_has_the_reason_in_anthropic_words(
    served: Served, fields: Json, kind: str, held: str
) -> None:
    body: Json = {"system": LONG, "messages": [USER], "max_tokens": 2}
    first = (await served.message(**body)).json()
    assert await reason_of(served, first["id"], **body) is None
    found = await reason_of(served, first["id"], **{**body, **fields})
    assert (found["type"], found["held"]) == (kind, held)
    assert found["cache_missed_input_tokens"] % 16 == 0


async def test_message_reason_counts_the_messages_of_the_request(served: Served) -> None:
    """The results of two calls are one message there, and two for the template."""
    uses = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {}} for n in range(2)]
    results = [
        {"type": "tool_result", "tool_use_id": f"c{n}", "content": LONG[:20]} for n in range(2)
    ]
    messages = [
        USER,
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
        {"role": "assistant", "content": LONG},
        {"role": "user", "content": LONG},
    ]
    first = (await served.message(messages=messages)).json()
    messages[3] = {"role": "assistant", "content": "A " + LONG}
    found = await reason_of(served, first["id"], messages=messages)
    assert (found["type"], found["held"]) == ("messages_changed", "messages.3")


async def test_message_with_no_tokens_fills_the_cache_only(served: Served) -> None:
    answer = (await served.message(max_tokens=0)).json()
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    assert answer["usage"]["output_tokens"] == 0
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 9}, {"stream": True}])
async def test_prewarm_reads_the_prompt_and_generates_nothing(served: Served, fields: Json) -> None:
    body = {"input": LONG, "prompt_cache_options": {"prewarm": True}, **fields}
    answer = await served.http.post("/v1/responses", json=body)
    if "stream" in fields:
        assert "output_item" not in answer.text
        assert '"status":"completed"' in answer.text
        return
    response = answer.json()
    assert (response["status"], response["output"]) == ("completed", [])
    assert response["usage"]["output_tokens"] == 0
    assert served.engine.requests[0].params.max_tokens == 1
    more = await respond(served, previous_response_id=response["id"])
    assert more["output"]


async def test_options_without_effect_are_named(served: Served) -> None:
    options = {"mode": "explicit", "ttl": "30m", "prewarm": True}
    response = await served.chat(prompt_cache_options=options)
    assert response.headers["x-ignored-params"] == "prompt_cache_options.prewarm"


async def test_prompts_of_another_tenant_are_not_found(says: Any, model: Any) -> None:
    engine = FakeEngine(says("ok"))
    async with serving(engine, model, key="sk-11111111", api_key=KEYS) as served:
        first = await respond(served)
        served.http.headers["authorization"] = "Bearer sk-22222222"
        found = (await respond(served, first["id"]))["prompt_cache_diagnostics"]
    assert found == {"type": "comparison_response_not_found"}


def record(number: int, num_tokens: int = 64) -> PromptRecord:
    chat = Chat([USER, {**USER, "content": str(number)}], {})
    return prompt_record(chat, [number] * num_tokens, 16, "", 0)


def record_with_image(digest: bytes) -> PromptRecord:
    """Return the record of a prompt whose tokens 20 to 39 show an image."""
    tokens = ImageTokens("<image>", "<image>", 9)
    shown = ReadImage(Image(digest, ()), 20, "<image>" * 20)
    message = {**USER, "content": [{"type": "image", "text": "<image>"}]}
    images = ShownImages([USER, message], [shown], tokens)
    return prompt_record(
        Chat([USER, message], {}, images=images), [1] * 20 + [9] * 20 + [2] * 24, 16, "", 0
    )


def test_record_tells_pictures_apart_whose_tokens_are_equal() -> None:
    cat, dog = record_with_image(b"cat"), record_with_image(b"dog")
    assert num_shared_blocks(cat, record_with_image(b"cat")) == 4
    assert num_shared_blocks(cat, dog) == 1
    assert cat.messages[0] == dog.messages[0]
    assert cat.messages[1] != dog.messages[1]


def test_record_holds_no_text_and_no_tokens() -> None:
    made = record(70_000)
    held = repr([getattr(made, name) for name in PromptRecord.__slots__])
    assert LONG not in held
    assert "70000" not in held
    assert len(made.blocks) == 4


def test_prompts_are_remembered_within_their_number() -> None:
    log = inspection.new_prompt_log()
    for number in range(inspection.MAX_PROMPTS + 9):
        log.put("", f"resp_{number}", record(number))
        log.make_room()
    assert len(log) == inspection.MAX_PROMPTS


def test_prompts_are_remembered_within_their_bytes() -> None:
    log: TenantStore[PromptRecord] = TenantStore(200_000, 10**6)
    record(0)
    tracemalloc.start()
    try:
        for number in range(300):
            log.put("", f"resp_{number:032x}", record(number, 16 * (number % 100)))
            log.make_room()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held <= 200_000
    assert len(log) > 100
