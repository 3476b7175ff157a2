"""/pooling, /invocations, /load and /ping, as in vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.conftest import BOS
from tests.support.fake_encoder import FakeEncoder, vector
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


@pytest.mark.parametrize("task", [None, "embed"])
async def test_pooling_returns_the_vectors_of_embeddings(encoder: Served, task: str | None) -> None:
    body = (await encoder.http.post("/pooling", json={"input": ["a", "ab"], "task": task})).json()
    assert body.keys() == {"object", "model", "usage", "id", "created", "data"}
    assert body["id"].startswith("pool-")
    assert [entry["object"] for entry in body["data"]] == ["pooling", "pooling"]
    expected = [vector([BOS, 64]).tolist(), vector([BOS, 64, 65]).tolist()]
    assert [entry["data"] for entry in body["data"]] == expected
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


@pytest.mark.parametrize(
    ("task", "start"),
    [
        ("classify", "Unsupported task: 'classify'"),
        ("token_classify", "Unsupported task: 'token_classify'"),
        ("token_embed", "Unsupported task: 'token_embed'"),
        ("plugin", "No IOProcessor plugin installed."),
    ],
)
async def test_pooling_of_another_task_is_refused(encoder: Served, task: str, start: str) -> None:
    response = await encoder.http.post("/pooling", json={"input": "a", "task": task})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "task")
    assert error["message"].startswith(start)


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"task": "classify"}, 400, "BadRequestError"),
        ({"dimensions": 0}, 400, "BadRequestError"),
        ({"model": "other"}, 404, "NotFoundError"),
    ],
)
async def test_errors_of_pooling_have_types_of_vllm(
    encoder: Served, fields: dict[str, Any], status: int, kind: str
) -> None:
    response = await encoder.http.post("/pooling", json={"input": "a", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, kind)
    other = await encoder.http.post("/v1/embeddings", json={"input": "a", "model": "other"})
    assert other.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a"]}),
        ("/pooling", {"input": "a", "task": "embed"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/score", {"queries": "a", "documents": ["b"]}),
        ("/v1/score", {"data_1": "a", "data_2": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b"]}),
        ("/rerank", {"query": "a", "texts": ["a", "b"]}),
    ],
)
async def test_invocations_answer_as_the_route_of_the_body(
    encoder: Served, path: str, body: dict[str, Any]
) -> None:
    direct = (await encoder.http.post(path, json=body)).json()
    found = (await encoder.http.post("/invocations", json=body)).json()
    for answer in (direct, found):
        if isinstance(answer, dict):
            answer.pop("id", None)
            answer.pop("created", None)
    assert found == direct


async def test_invocations_of_a_decoder_are_chats_and_completions(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("Hello")), model, key="k", api_key=("k",)) as keyed:

        async def invoke(**body: Any) -> Any:
            return await keyed.http.post("/invocations", json=body)

        chat = (await invoke(messages=HI)).json()
        assert chat["choices"][0]["message"]["content"] == "Hello"
        assert (await invoke(prompt="a")).json()["choices"][0]["text"] == "Hello"
        stream = (await invoke(prompt="a", stream=True)).text
        assert stream.endswith("data: [DONE]\n\n")
        assert (await invoke(input="a")).json()["error"]["code"] == "unsupported_model"
        assert (await invoke(text="a")).json()["error"]["code"] == "invalid_value"
        refused = await invoke(messages=HI, temperature=3)
        assert refused.json()["error"]["param"] == "temperature"
        bare = await keyed.http.post("/invocations", json={}, headers={"authorization": ""})
        assert bare.status_code == 401


async def test_load_counts_running_and_waiting_requests(served: Served) -> None:
    stats = served.engine.stats
    served.engine.stats = msgspec.structs.replace(stats, running=2, waiting=3)
    assert (await served.http.get("/load")).json() == {"server_load": 5}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(served: Served, method: str) -> None:
    response = await served.http.request(method, "/ping")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    served.engine.die()
    assert (await served.http.request(method, "/ping")).status_code == 503
