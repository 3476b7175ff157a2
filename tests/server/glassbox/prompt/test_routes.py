"""POST /ui/api/prompt: tokens, offsets and warnings of a chat or a text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.protocol.outputs import EngineStats, PrefillChunk, StepOutputs
from tests.server.conftest import BOS
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

UI = {"x-penstock-ui": "1"}
PATH = "/ui/api/prompt"
ODD = [
    "é",
    "😀",
    "👩‍👩‍👧",
    "a",
    " ",
    "\n",
    "\t",
    "<s>",
    "</s>",
    "日本",
    "\u200b",
    "ﬀ",
    "Z",
    "'",
    "&",
]


async def asked(served: Served, **fields: Any) -> dict[str, Any]:
    response = await served.http.post(PATH, json=fields, headers=UI)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def check_pieces(answer: dict[str, Any]) -> None:
    """Pieces make up the text, at the offsets; a part of a character has bytes instead."""
    ids, text = answer["ids"], answer["text"]
    for name in ("offsets", "pieces", "entries", "bytes", "special"):
        assert len(answer[name]) == len(ids), name
    assert "".join(answer["pieces"]) == text
    for offset, piece in zip(answer["offsets"], answer["pieces"], strict=True):
        assert text[offset : offset + len(piece)] == piece
    encoded = b"".join(
        bytes.fromhex(part) if part is not None else piece.encode()
        for part, piece in zip(answer["bytes"], answer["pieces"], strict=True)
    )
    # A character that several tokens share is also the piece of the last of them.
    assert encoded == text.encode()


@pytest.mark.parametrize("number", range(20))
async def test_prompt_pieces_rebuild_the_text(served: Served, number: int) -> None:
    text = "".join(random.choices(ODD, k=number * 2))
    for fields in ({"prompt": text}, {"messages": [{"role": "user", "content": f"x{text}"}]}):
        check_pieces(await asked(served, **fields))


async def test_prompt_tokens_are_those_that_a_request_gets(served: Served) -> None:
    messages = [{"role": "user", "content": "Hé 😀"}]
    shown = await asked(served, messages=messages)
    await served.chat(messages=messages)
    text = await asked(served, prompt="A 😀")
    await served.http.post("/v1/completions", json={"prompt": "A 😀", "max_tokens": 1})
    empty = await asked(served, prompt="")
    await served.http.post("/v1/completions", json={"prompt": "", "max_tokens": 1})
    sent = [request.prompt for request in served.engine.requests]
    assert [shown["ids"], text["ids"], empty["ids"]] == sent
    assert shown["special"][0]
    assert shown["entries"][0] == "<s>"
    assert text["ids"][0] == BOS
    assert text["pieces"][0] == ""


async def test_prompt_asks_the_engine_for_the_callers_prefixes(model: Path) -> None:
    engine = FakeEngine(lambda request: [])
    engine.cached_tokens = 3
    async with serving(engine, model, api_key=("one", "two")) as served:
        for key in ("one", "two"):
            headers = {**UI, "authorization": f"Bearer {key}"}
            body = {"prompt": "Hello there"}
            answer = (await served.http.post(PATH, json=body, headers=headers)).json()
            assert answer["cached_tokens"] == 3
    (first, salt, _), (second, other, _) = engine.lookups
    assert first == second == answer["ids"]
    assert salt != other


async def test_prompt_beyond_the_context_is_warned_about_and_not_looked_up(served: Served) -> None:
    served.engine.cached_tokens = 3
    answer = await asked(served, prompt="x" * 600)
    assert (answer["cached_tokens"], answer["max_model_len"]) == (0, 512)
    found = {(warning["code"], warning["param"]) for warning in answer["lint"]}
    assert ("context_length_exceeded", "prompt") in found


async def test_prompt_of_an_encoder_decoder_looks_its_source_up(model: Path) -> None:
    info = replace(INFO, kind="encoder-decoder", start_token=7)
    engine = FakeEngine(lambda request: [], info=info)
    async with serving(engine, model) as served:
        answer = await asked(served, prompt="Hello")
    assert engine.lookups == [([7], "", answer["ids"])]


async def test_prompt_without_the_header_is_refused(served: Served) -> None:
    response = await served.http.post(PATH, json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "missing_header")


async def test_prompt_prefill_cost_comes_from_the_recorded_steps(served: Served) -> None:
    assert (await asked(served, prompt="a"))["prefill"] is None
    recorder = served.app.state.glassbox.recorder
    recorder.begin("r", "", 0.0, [1])
    at = 100.0
    for number in range(60):
        count = 1 + number % 37
        seconds = 0.005 + 0.0002 * count
        at += seconds + 0.001
        stats = EngineStats(step=number, step_seconds=seconds, step_prefill_tokens=count)
        chunk = PrefillChunk(1, 0, count)
        for listen in list(served.engine.step_listeners):
            listen(StepOutputs(at, [], [], stats, prefills=[chunk]))
    cost = (await asked(served, prompt="a"))["prefill"]
    assert cost["us_per_token"] == pytest.approx(200, rel=0.02)
    assert cost["base_ms"] == pytest.approx(5, rel=0.02)
    assert cost["steps"] == 60


async def test_unknown_field_is_refused_and_one_in_a_message_is_reported(served: Served) -> None:
    message = {"role": "user", "content": "Hi", "mood": "good"}
    body = {"messages": [message], "add_generation_promt": False}
    refused = await served.http.post(PATH, json=body, headers=UI)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "add_generation_promt"
    reported = await served.http.post(PATH, json={"messages": [message]}, headers=UI)
    assert reported.headers["x-ignored-params"] == "messages.mood"


LONG = [{"role": "user", "content": "The river runs past the old mill. " * 3}]


async def test_comparison_with_another_prompt_names_the_first_block_that_differs(
    served: Served,
) -> None:
    changed = [{"role": "user", "content": LONG[0]["content"].replace("old", "new")}]
    found = await asked(served, messages=changed, baseline={"messages": LONG})
    block = (found["text"].index("new") - len("<s>") + 1) // found["block_size"]
    assert found["comparison"] == {
        "type": "miss",
        "first_different_block": block,
        "held": "messages.0",
        "reusable_tokens": block * 16,
        "lost_tokens": (len(found["ids"]) - 1) // 16 * 16 - block * 16,
    }
    text = await asked(served, prompt="x" * 99, baseline={"prompt": "y" * 99})
    assert text["comparison"]["held"] == "text"


async def test_comparison_counts_the_system_message_among_the_messages(served: Served) -> None:
    system = {"role": "system", "content": "Be brief."}
    changed = [system, {"role": "user", "content": "z" + LONG[0]["content"]}]
    found = await asked(served, messages=changed, baseline={"messages": [system, *LONG]})
    assert found["comparison"]["held"] == "messages.1"


async def test_comparison_with_the_prompt_of_an_answer_is_that_of_the_api(served: Served) -> None:
    first = (await served.message(messages=LONG)).json()
    changed = [{"role": "user", "content": "z" + LONG[0]["content"]}]
    body = {"messages": changed, "diagnostics": {"previous_message_id": first["id"]}}
    reason = (await served.message(**body)).json()["diagnostics"]["cache_miss_reason"]
    found = (await asked(served, messages=changed, comparison_id=first["id"]))["comparison"]
    assert found["lost_tokens"] == reason["cache_missed_input_tokens"]
    assert found["held"] == reason["held"]
    assert found["first_different_block"] == reason["first_different_block"]


async def test_comparison_without_a_loss_says_whether_the_cache_has_the_prompt(
    served: Served,
) -> None:
    assert (await asked(served, messages=LONG))["comparison"] is None
    found = await asked(served, messages=LONG, baseline={"messages": LONG})
    assert found["comparison"] == {"type": "evicted"}
    served.engine.cached_tokens = 32
    found = await asked(served, messages=LONG, baseline={"messages": LONG})
    assert found["comparison"] == {"type": "hit"}
    found = await asked(served, messages=LONG, comparison_id="resp_none")
    assert found["comparison"] == {"type": "not_found"}


async def test_comparison_with_two_prompts_is_refused(served: Served) -> None:
    body = {"prompt": "a", "baseline": {"prompt": "b"}, "comparison_id": "c"}
    response = await served.http.post(PATH, json=body, headers=UI)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "comparison_id"
