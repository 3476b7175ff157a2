"""POST /ui/api/explain: what is refused, and what reaches the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.protocol.generate import KEPT, Explained, GenerateRequest
from server.glassbox.explain import routes as explain_route
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving

UI = {"x-penstock-ui": "1"}


async def post(served: Served, body: dict[str, Any], key: str = "") -> httpx2.Response:
    headers = {**UI, **({"authorization": f"Bearer {key}"} if key else {})}
    return await served.http.post("/ui/api/explain", json=body, headers=headers)


def answer_explain_requests(engine: FakeEngine) -> None:
    """Let the engine double explain each token as the only candidate, drawn with luck 0.5."""
    submit = engine.submit

    def submitting(requests: Any) -> Any:
        stream = submit(requests)
        for request in requests:
            if request.explain is not None:
                stream.explained = {
                    index: explained(request.id, index, token)
                    for index, token in enumerate(request.explain.answer)
                }
        return stream

    engine.submit = submitting  # type: ignore[method-assign]


def explained(request_id: int, index: int, token: int) -> Explained:
    one = [1.0]
    return Explained(
        request_id, index, token, 1, 0.0, 0.0, 1, 1.0, [token], one, one, one, one, [KEPT], [0.5]
    )


def sent(served: Served) -> GenerateRequest:
    [request] = served.engine.requests
    assert isinstance(request, GenerateRequest)
    return request


async def test_request_of_the_engine_has_the_answers_parameters(served: Served) -> None:
    answer_explain_requests(served.engine)
    params = {"seed": 5, "temperature": 0.7, "top_p": 0.9, "min_tokens": 2, "cache_salt": "mine"}
    body = {"prompt_ids": [1, 2, 3], "answer_ids": [7, 8, 9], "params": params}
    response = await post(served, body)
    assert response.status_code == 200, response.text
    request = sent(served)
    assert request.prompt == [1, 2, 3, 7, 8]
    assert request.params.max_tokens == 1
    assert request.salt == "mine"
    assert request.explain is not None
    assert request.explain.answer == [7, 8, 9]
    assert 0 < request.explain.max_per_step <= 64
    drawn = request.explain.params
    assert (drawn.seed, drawn.temperature, drawn.top_p, drawn.min_tokens) == (5, 0.7, 0.9, 2)
    report = response.json()
    assert report["agrees"] == 3
    assert report["tokens"][0] == [7, 1, 0, 0, 1, 1, True, [[7, 1, 1, 1, 1, KEPT, 0.5]], 7]
    assert report["pieces"].keys() == {"7", "8", "9"}


@pytest.mark.parametrize("seed", [{}, {"seed": None}, {"seed": -1}], ids=str)
async def test_answer_without_a_seed_has_no_dice(served: Served, seed: dict[str, Any]) -> None:
    answer_explain_requests(served.engine)
    params = {"temperature": 1.0, **seed}
    report = (await post(served, {"prompt_ids": [1], "answer_ids": [7], "params": params})).json()
    assert report["agrees"] is None
    [row] = report["tokens"]
    assert (row[6], row[8], row[7][0][6]) == (None, None, None)


async def test_grammar_reaches_the_engine(served: Served) -> None:
    answer_explain_requests(served.engine)
    params = {"seed": 1, "response_format": {"type": "json_object"}}
    await post(served, {"prompt_ids": [1], "answer_ids": [7], "params": params})
    request = sent(served)
    assert request.grammar is not None
    assert request.params.grammar is None


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"answer_ids": []}, "answer_ids", "at least 1"),
        ({"answer_ids": [7] * 1025}, "answer_ids", "at most 1024"),
        ({"answer_ids": [7] * 1000}, "prompt_ids", "maximum context length"),
        ({"answer_ids": [10**6]}, "answer_ids", "out of vocabulary"),
        ({"prompt_ids": [10**6]}, "prompt_ids", "out of vocabulary"),
        ({"prompt_ids": []}, "prompt_ids", "at least 1"),
        ({"candidates": 33}, "candidates", "32"),
        ({"params": {"temperature": 3}}, "params.temperature", "less than or equal to 2"),
        ({"params": {"length_penalty": 0.9}}, "length_penalty", "not supported"),
        ({"params": {"logit_bias": {"9999999": 1}}}, "logit_bias", "token id"),
    ],
    ids=str,
)
async def test_bounds_are_refused_with_the_field(
    served: Served, changes: dict[str, Any], param: str, words: str
) -> None:
    body = {"prompt_ids": [1, 2], "answer_ids": [7, 8], "params": {"seed": 1}, **changes}
    response = await post(served, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not served.engine.requests


async def test_unknown_fields_are_refused(served: Served) -> None:
    body = {"prompt_ids": [1], "answer_ids": [7], "params": {"seed": 1, "luck": 2}, "more": 3}
    response = await post(served, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "more")
    assert "more, params.luck" in error["message"]
    assert not served.engine.requests


async def test_salt_has_the_callers_tenant(tmp_path: Path, model: Path, says: Any) -> None:
    """Another tenant's cached prefix cannot be probed, not even with its salt."""
    (tmp_path / "keys").write_text("first\nsecond\n")
    keys = {"api_key_file": str(tmp_path / "keys")}
    async with serving(FakeEngine(says("Hello")), model, **keys) as both:
        answer_explain_requests(both.engine)
        body = {"prompt_ids": [1], "answer_ids": [7], "params": {"seed": 1, "cache_salt": "s"}}
        for key in ("first", "second"):
            assert (await post(both, body, key)).status_code == 200
        one, other = (request.salt for request in both.engine.requests)
        assert one != other
        assert (await post(both, body)).status_code == 401


async def test_request_without_the_header_is_refused(served: Served) -> None:
    response = await served.http.post("/ui/api/explain", json={})
    assert response.status_code == 403


async def test_explanation_that_waits_too_long_for_others_is_busy(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_explain_requests(served.engine)
    monkeypatch.setattr(explain_route, "MAX_WAIT", 0.1)
    served.engine.gate.clear()
    body = {"prompt_ids": [1], "answer_ids": [7]}
    first = asyncio.create_task(post(served, body))
    await eventually(lambda: bool(served.engine.requests), "the first one is sent")
    refused = await post(served, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
    assert refused.headers["retry-after"] == "5"
    served.engine.gate.set()
    assert (await first).status_code == 200


async def test_client_that_leaves_before_its_turn_is_never_sent(served: Served) -> None:
    answer_explain_requests(served.engine)
    served.engine.gate.clear()
    first, second, third = (
        asyncio.create_task(post(served, {"prompt_ids": [number], "answer_ids": [7]}))
        for number in range(1, 4)
    )
    await eventually(lambda: bool(served.engine.requests), "the first one is sent")
    await asyncio.sleep(0.1)
    second.cancel()
    first.cancel()
    await eventually(lambda: len(served.engine.requests) == 2, "the third one is sent")
    served.engine.gate.set()
    assert (await third).status_code == 200
    assert [request.prompt for request in served.engine.requests] == [[1], [3]]
    assert served.engine.aborted == [served.engine.requests[0].id]
