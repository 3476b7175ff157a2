"""/responses without /v1: OpenAI's responses, with llama.cpp's progress and timings in streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.rig import Served

OWN, OPENAI = "/responses", "/v1/responses"


async def events(served: Served, path: str = OWN, **fields: Any) -> list[dict[str, Any]]:
    body = {"input": "Hi", "stream": True, **fields}
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join([e["delta"] for e in found if e["type"] == "response.output_text.delta"])


async def test_progress_comes_before_the_text_in_numbered_events(served: Served) -> None:
    found = await events(served, return_progress=True)
    total = len(served.engine.requests[-1].prompt)
    progress = [event for event in found if "prompt_progress" in event]
    reported = [event["prompt_progress"] for event in progress]
    assert [each["processed"] for each in reported] == [0, total]
    assert {each["total"] for each in reported} == {total}
    for event in progress:
        assert event["type"] == "response.in_progress"
        assert event["response"]["id"] == found[0]["response"]["id"]
        assert "timings" not in event
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert text_of(found) == "Hello wörld!"


async def test_timings_are_with_each_delta_on_request_and_with_the_end(served: Served) -> None:
    found = await events(served, timings_per_token=True, return_progress=True)
    deltas = [event for event in found if event["type"].endswith(".delta")]
    assert deltas
    assert all(event["timings"]["predicted_n"] >= 1 for event in deltas)
    assert all("timings" in event for event in found if "prompt_progress" in event)
    [end] = [event for event in found if event["type"] == "response.completed"]
    assert end["timings"]["predicted_n"] == end["response"]["usage"]["output_tokens"]
    timed = [event["type"] for event in await events(served) if "timings" in event]
    assert timed == ["response.completed"]
    cut = [
        event["type"] for event in await events(served, max_output_tokens=2) if "timings" in event
    ]
    assert cut == ["response.incomplete"]


async def test_openais_path_has_neither(served: Served) -> None:
    found = await events(served, OPENAI)
    assert not any("timings" in event or "prompt_progress" in event for event in found)
    assert text_of(found) == text_of(await events(served))


async def test_whole_response_is_openais_and_can_be_read_again(served: Served) -> None:
    whole = (await served.http.post(OWN, json={"input": "Hi"})).json()
    assert "timings" not in whole
    other = (await served.http.post(OPENAI, json={"input": "Hi"})).json()
    assert whole.keys() == other.keys()
    assert (await served.http.get(f"{OPENAI}/{whole['id']}")).json() == whole


@pytest.mark.parametrize("value", [True, 1])
async def test_progress_of_a_whole_response_is_refused(served: Served, value: Any) -> None:
    body = {"input": "Hi", "return_progress": value}
    response = await served.http.post(OWN, json=body)
    assert response.status_code == 400
    assert "return_progress" in response.json()["error"]["message"]
