"""/chat/completions of llama.cpp: its template variables, first chunk, timings and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

HI = [{"role": "user", "content": "Hi"}]
DATED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}|{{ date_string }}|{{ datetime }}|"
    "{{ enable_thinking }}"
)
PATHS = ("/chat/completions", "/v1/chat/completions")


async def chat(served: Served, path: str = PATHS[0], **fields: Any) -> httpx2.Response:
    return await served.http.post(path, json={"messages": HI, **fields})


async def chunks(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    text = (await chat(served, path, stream=True, **fields)).text
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]


@pytest.fixture
async def dated(
    model: Path, says: Callable[[str], Script], tmp_path: Path
) -> AsyncIterator[Served]:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    engine = FakeEngine(says("x"))
    async with serving(engine, model, chat_template=str(template)) as running:
        yield running


async def applied(served: Served, **fields: Any) -> list[str]:
    response = await served.http.post("/apply-template", json={"messages": HI, **fields})
    assert "x-ignored-params" not in response.headers
    return list(response.json()["prompt"].split("|"))


async def test_templates_get_todays_date_and_thoughts(dated: Served) -> None:
    now = datetime.now().astimezone()
    wanted = [now.strftime("%d %b %Y"), now.strftime("%b %d %Y"), "True"]
    assert await applied(dated) == ["Hi", *wanted]
    for path, text in zip(PATHS, ("|".join(["Hi", *wanted]), "Hi|||"), strict=True):
        response = await chat(dated, path)
        assert "x-ignored-params" not in response.headers
        ids = dated.engine.requests[-1].prompt
        verbose = (await chat(dated, path, verbose=True)).json().get("__verbose")
        assert verbose == ({"prompt": text} if path == PATHS[0] else None)
        assert dated.engine.requests[-1].prompt == ids


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"chat_template_kwargs": {"date_string": "1 May 2020"}}, ["1 May 2020", "True"]),
        ({"chat_template_kwargs": {"enable_thinking": False}}, [None, "False"]),
        ({"reasoning_effort": "none"}, [None, "False"]),
    ],
)
async def test_arguments_of_the_request_come_first(
    dated: Served, fields: dict[str, Any], wanted: list[str | None]
) -> None:
    _, date, _, thinking = await applied(dated, **fields)
    assert thinking == wanted[1]
    assert wanted[0] in (None, date)


@pytest.mark.parametrize(("flag", "wanted"), [("on", "True"), ("off", "False")])
async def test_reasoning_flag_is_the_default_of_every_chat(
    model: Path, says: Callable[[str], Script], tmp_path: Path, flag: str, wanted: str
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    settings = {"chat_template": str(template), "reasoning": flag}
    async with serving(FakeEngine(says("x")), model, **settings) as served:
        assert (await applied(served))[-1] == wanted
        asked = {"chat_template_kwargs": {"enable_thinking": wanted == "False"}}
        assert (await applied(served, **asked))[-1] != wanted
        lengths = []
        for kwargs in ({}, {"enable_thinking": wanted == "True"}):
            await chat(served, PATHS[1], chat_template_kwargs=kwargs)
            lengths.append(served.engine.requests[-1].prompt)
        assert lengths[0] == lengths[1]


async def test_input_tokens_count_the_prompt_of_the_same_path(dated: Served) -> None:
    for path in PATHS:
        counted = (await dated.http.post(f"{path}/input_tokens", json={"messages": HI})).json()
        usage = (await chat(dated, path)).json()["usage"]
        assert counted["input_tokens"] == usage["prompt_tokens"]


async def test_first_chunk_has_null_content_and_the_last_has_timings(served: Served) -> None:
    fields = {"stream_options": {"include_usage": True}}
    first, *_, last = await chunks(served, PATHS[0], **fields)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "timings" not in first
    assert last["choices"] == []
    assert last["timings"]["predicted_n"] == last["usage"]["completion_tokens"]
    first, *_, last = await chunks(served, PATHS[1], **fields)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "timings" not in last


async def test_whole_answer_has_timings(served: Served) -> None:
    assert (await chat(served)).json()["timings"]["prompt_n"] > 0
    assert "timings" not in (await chat(served, PATHS[1])).json()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATHS[0], {"messages": [{"role": "user", "content": "a" * 600}]}),
        ("/completion", {"prompt": "a" * 600}),
        ("/completion", {"prompt": "a" * 600, "stream": True}),
    ],
)
async def test_a_prompt_above_the_context_names_both_lengths(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    response = await served.http.post(path, json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > 600
    assert error["n_ctx"] == 512
    assert "exceeds the available context size of 512 tokens" in error["message"]


async def test_openais_path_keeps_openais_error(served: Served) -> None:
    messages = [{"role": "user", "content": "a" * 600}]
    error = (await chat(served, PATHS[1], messages=messages)).json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "fields", "shown"),
    [
        (PATHS[0], {}, True),
        (PATHS[0], {"verbose": False}, False),
        (PATHS[1], {}, False),
    ],
)
async def test_debug_log_level_shows_the_prompt_on_llamacpps_path(
    model: Path, says: Callable[[str], Script], path: str, fields: dict[str, Any], shown: bool
) -> None:
    async with serving(FakeEngine(says("x")), model, log_level="debug") as served:
        assert ("__verbose" in (await chat(served, path, **fields)).json()) == shown


ANSWER = [*HI, {"role": "assistant", "content": "Once"}]


async def test_a_final_answer_is_continued_on_llamacpps_path(dated: Served) -> None:
    now, *_ = await applied(dated, messages=ANSWER)
    assert now == "HiOnce"
    await chat(dated, PATHS[0], messages=ANSWER)
    continued = dated.engine.requests[-1].prompt
    await chat(dated, PATHS[1], messages=ANSWER)
    assert len(continued) < len(dated.engine.requests[-1].prompt), "/v1 keeps OpenAI's behaviour"


@pytest.mark.parametrize(
    ("fields", "is_continued"),
    [
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
        ({"add_generation_prompt": False}, False),
        ({"add_generation_prompt": False, "continue_final_message": True}, True),
        ({"add_generation_prompt": None, "continue_final_message": None}, True),
    ],
)
async def test_a_request_that_says_how_the_answer_begins_is_obeyed(
    dated: Served, fields: dict[str, Any], is_continued: bool
) -> None:
    found = await applied(dated, messages=ANSWER, **fields)
    assert (len(found) == 1) == is_continued


async def test_two_answers_at_the_end_are_refused_on_llamacpps_path(dated: Served) -> None:
    messages = [*ANSWER, ANSWER[-1]]
    response = await chat(dated, messages=messages)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert (await chat(dated, add_generation_prompt=True, messages=messages)).status_code == 200
    assert (await chat(dated, PATHS[1], messages=messages)).status_code == 200


async def test_verbose_in_a_stream_is_refused(served: Served) -> None:
    response = await chat(served, verbose=True, stream=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "verbose")


def reports(found: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    progress = [part["prompt_progress"] for part in found if "prompt_progress" in part]
    assert all(each["time_ms"] >= 0 for each in progress)
    return [(each["total"], each["cache"], each["processed"]) for each in progress]


async def test_progress_of_a_chat_comes_before_its_text(served: Served) -> None:
    found = await chunks(served, PATHS[0], return_progress=True)
    total = len(served.engine.requests[-1].prompt)
    assert reports(found) == [(total, 0, 0), (total, 0, total)]
    role, *progress = found[:3]
    assert "role" in role["choices"][0]["delta"]
    assert all("prompt_progress" in part for part in progress)
    text = "".join([part["choices"][0]["delta"].get("content") or "" for part in found])
    assert text == "Hello wörld!"
    assert not reports(await chunks(served, PATHS[0]))


async def test_progress_of_a_completion_has_timings_on_request(served: Served) -> None:
    body = {"prompt": "abcd", "stream": True, "return_progress": True, "timings_per_token": True}
    text = (await served.http.post("/completion", json=body)).text
    found = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
    assert reports(found) == [(5, 0, 0), (5, 0, 5)]
    first, second = [part["timings"] for part in found[:2]]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"]) == (0, 0.0, 0)
    assert second["prompt_n"] == 5


@pytest.mark.parametrize("path", [PATHS[0], "/completion"])
async def test_progress_of_a_whole_answer_is_refused(served: Served, path: str) -> None:
    body = {"messages": HI, "prompt": "a", "return_progress": True}
    response = await served.http.post(path, json=body)
    assert response.status_code == 400
    assert "return_progress" in response.json()["error"]["message"]
