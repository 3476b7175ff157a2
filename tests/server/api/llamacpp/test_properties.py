"""/props, /slots, /apply-template, input_tokens, and routes without /v1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.server.conftest import TEMPLATE
from tests.support.fake_engine import INFO, FakeEngine, Script
from tests.support.rig import Served, serving

HI = [{"role": "user", "content": "Hi"}]


async def test_props_have_the_context_the_defaults_and_the_template(served: Served) -> None:
    body = (await served.http.get("/props")).json()
    assert body["total_slots"] == INFO.max_num_seqs
    assert body["default_generation_settings"]["n_ctx"] == INFO.max_model_len
    params = body["default_generation_settings"]["params"]
    # The first three are those of the checkpoint.
    assert (params["temperature"], params["top_k"], params["min_p"]) == (0.6, 20, 0.1)
    assert (params["repeat_penalty"], params["seed"]) == (1.0, -1)
    assert (body["model_alias"], body["chat_template"]) == ("tiny", TEMPLATE)
    assert (body["bos_token"], body["eos_token"]) == ("<s>", "</s>")
    assert body["modalities"] == {"vision": False, "audio": False}


async def test_slots_are_the_sequences_of_a_step(served: Served) -> None:
    stats = served.engine.stats
    served.engine.stats = msgspec.structs.replace(stats, running=2)
    body = (await served.http.get("/slots")).json()
    assert [slot["id"] for slot in body] == list(range(INFO.max_num_seqs))
    assert [slot["is_processing"] for slot in body[:3]] == [True, True, False]
    assert {slot["n_ctx"] for slot in body} == {INFO.max_model_len}


async def test_apply_template_returns_the_text_of_the_prompt(served: Served) -> None:
    response = await served.http.post("/apply-template", json={"messages": HI})
    assert response.json() == {"prompt": "<s><user>Hi\n<assistant><think>"}
    arguments = {"odd": 1, "enable_thinking": False}
    body = {"messages": HI, "add_generation_prompt": False, "chat_template_kwargs": arguments}
    response = await served.http.post("/apply-template", json=body)
    assert response.json() == {"prompt": "<s><user>Hi\n"}
    assert response.headers["x-ignored-params"] == "odd"
    assert not served.engine.requests


@pytest.mark.parametrize("start", ["", "/v1"])
async def test_input_tokens_are_those_of_the_chat(served: Served, start: str) -> None:
    path = f"{start}/chat/completions/input_tokens"
    body = (await served.http.post(path, json={"messages": HI})).json()
    chat = {"messages": HI, "max_tokens": 1}
    answer = await served.http.post(f"{start}/chat/completions", json=chat)
    usage = answer.json()["usage"]
    assert body == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}


async def test_routes_without_v1_answer_as_those_with_it(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("Hello")), model, key="k", api_key=("k",)) as keyed:
        chat = {"messages": HI}
        answer = (await keyed.http.post("/chat/completions", json=chat)).json()
        assert answer["choices"][0]["message"]["content"] == "Hello"
        answer = (await keyed.http.post("/responses", json={"input": "Hi"})).json()
        assert answer["output"][0]["content"][0]["text"] == "Hello"
        listed = (await keyed.http.get("/models")).json()
        assert listed == (await keyed.http.get("/v1/models")).json()
        for path in ("/models", "/props", "/slots"):
            bare = await keyed.http.get(path, headers={"authorization": ""})
            assert bare.status_code == 401
