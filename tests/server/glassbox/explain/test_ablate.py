"""POST /ui/api/ablate: what is refused, and what reaches the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from engine.protocol.generate import Ablation
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

UI = {"x-penstock-ui": "1"}
BODY = {"prompt": [40, 41, 42], "max_tokens": 4, "seed": 5}


@pytest.fixture
async def served(model: Path, says: Any) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("Hello")), model) as running:
        yield running


async def post(served: Served, body: Any, path: str = "/ui/api/ablate") -> httpx2.Response:
    return await served.http.post(path, json={**BODY, **body}, headers=UI)


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ({}, None),
        ({"heads": [], "layers": []}, None),
        ({"layers": [1, 0, 1]}, Ablation((), (0, 1))),
        ({"heads": [[1, 1], [0, 3], [1, 1]]}, Ablation(((0, 3), (1, 1)))),
        ({"heads": [[0, 0]], "layers": [1]}, Ablation(((0, 0),), (1,))),
    ],
    ids=str,
)
async def test_ablation_reaches_the_engine(
    served: Served, off: dict[str, Any], expected: Ablation | None
) -> None:
    answer = await post(served, {"off": off})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"]
    (request,) = served.engine.requests
    assert request.ablation == expected
    assert (request.prompt, request.params.seed) == (BODY["prompt"], 5)


async def test_stream_of_an_ablation_is_that_of_completions(served: Served) -> None:
    answer = await post(served, {"off": {"layers": [0]}, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_completions_never_carry_an_ablation(served: Served) -> None:
    answer = await post(served, {"off": {"layers": [0]}}, "/v1/completions")
    assert answer.headers["x-ignored-params"] == "off"
    (request,) = served.engine.requests
    assert request.ablation is None


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "off"),
        ({"off": {"layers": [2]}}, "invalid_value", "off.layers"),
        ({"off": {"layers": [-1]}}, "invalid_value", "off.layers.0"),
        ({"off": {"heads": [[2, 0]]}}, "invalid_value", "off.heads"),
        ({"off": {"heads": [[1, 2]]}}, "invalid_value", "off.heads"),
        ({"off": {"heads": [[1]]}}, "invalid_value", "off.heads.0"),
        ({"off": {"layers": [0] * 5000}}, "invalid_value", "off.layers"),
        ({"off": {"head": [[0, 1]]}}, "unsupported_parameter", "off.head"),
        ({"off": {"heads": [[0, 1]], "mlps": [1]}}, "unsupported_parameter", "off.mlps"),
        ({"off": {}, "layers": [1]}, "unsupported_parameter", "layers"),
        ({"off": {"layers": [0]}, "temperature": -1}, "invalid_value", "temperature"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_wrong_ablation_is_refused(
    served: Served, body: dict[str, Any], code: str, param: str
) -> None:
    answer = await post(served, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert not served.engine.requests


async def test_ranks_that_share_a_model_refuse_with_the_reason(model: Path, says: Any) -> None:
    info = msgspec.structs.replace(INFO, ablatable_heads=(), other_ranks=((),))
    async with serving(FakeEngine(says("Hello"), info=info), model) as served:
        answer = await post(served, {"off": {"layers": [0]}})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "ablation_unavailable"
    assert "--tensor-parallel-size 2" in answer.json()["error"]["message"]


async def test_ablation_is_a_route_of_the_pages(served: Served) -> None:
    answer = await served.http.post("/ui/api/ablate", json={**BODY, "off": {}})
    assert answer.status_code == 403
