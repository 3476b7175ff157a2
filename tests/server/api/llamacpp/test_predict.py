"""/predict: instances of Vertex AI as bodies of other routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, eventually, serving

CHAT = {
    "@requestFormat": "chatCompletions",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
}
PLAIN = {"@requestFormat": "/completion", "prompt": "ab", "n_predict": 2}


async def predict(served: Served, *instances: Any, **fields: Any) -> httpx2.Response:
    return await served.http.post("/predict", json={"instances": list(instances), **fields})


async def test_predict_answers_each_instance_as_its_route(served: Served) -> None:
    own = {**CHAT, "@requestFormat": "/chat/completions"}
    template = {**CHAT, "@requestFormat": "applyTemplate"}
    response = await predict(served, CHAT, PLAIN, own, template)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    chat, plain, timed, text = response.json()["predictions"]
    assert chat["choices"][0]["message"]["content"] == "Hell"
    assert "timings" not in chat
    assert (plain["content"], plain["tokens_predicted"]) == ("He", 2)
    assert "timings" in timed
    assert "Hi" in text["prompt"]
    assert len(served.engine.requests) == 3


async def test_predict_returns_the_error_of_an_instance_in_its_place(served: Served) -> None:
    bad = {**CHAT, "temperature": 9}
    wrong, right = (await predict(served, bad, CHAT)).json()["predictions"]
    assert wrong["error"]["param"] == "temperature"
    assert right["choices"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"instances": []}, "instances"),
        ({"instances": [CHAT] * 129}, "instances"),
        ({"instances": "a"}, "instances"),
        ({"instances": [CHAT, "a"]}, "instances.1"),
        ({}, "instances"),
        ({"instances": [{"messages": []}]}, "instances.0"),
        ({"instances": [CHAT, {**CHAT, "@requestFormat": "/metrics"}]}, "instances.1"),
        ({"instances": [{**CHAT, "@requestFormat": ["chatCompletions"]}]}, "instances.0"),
        ({"instances": [{**CHAT, "stream": True}]}, "instances.0.stream"),
        ({"instances": [CHAT], "parameters": {"temperature": 0}}, "parameters"),
    ],
)
async def test_predict_refuses_what_it_cannot_do(
    served: Served, body: dict[str, Any], param: str
) -> None:
    response = await served.http.post("/predict", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("limit", "instances", "status"),
    [
        ("requests_per_minute=3", 4, 429),
        ("concurrent_requests=2", 2, 200),  # each ends, so three requests in turn are served
    ],
)
async def test_predict_counts_each_instance_against_the_limits_of_its_key(
    model: Path,
    says: Callable[[str], Script],
    tmp_path: Path,
    limit: str,
    instances: int,
    status: int,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alpha {limit}\n")
    headers = {"authorization": "Bearer alpha"}
    async with serving(FakeEngine(says("x")), model, api_key_file=str(keys)) as served:
        for _ in range(3):
            body = {"instances": [CHAT] * instances}
            answer = await served.http.post("/predict", json=body, headers=headers)
            assert answer.status_code == status
        assert bool(served.engine.requests) == (status == 200)


async def test_predict_aborts_all_instances_when_the_client_leaves(
    model: Path, says: Callable[[str], Script]
) -> None:
    engine = FakeEngine(says("x"))
    async with serving(engine, model) as served:
        engine.gate.clear()
        asked = asyncio.create_task(predict(served, CHAT, CHAT))
        await eventually(lambda: len(engine.requests) == 2, "both instances are sent")
        asked.cancel()
        await eventually(lambda: len(engine.aborted) == 2, "both are aborted")
        assert sorted(engine.aborted) == sorted(request.id for request in engine.requests)
