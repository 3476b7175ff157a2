"""Requests at the parent: to which model they go, how answers come back, and what ends early."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.state import OLLAMA_VERSION, VERSION
from tests.support.fake_models import FakeModel, Fleet, served, spec_of
from tests.support.rig import eventually

CHAT = "/v1/chat/completions"
STREAM = b'{"stream":true, "model": "a"}'
JSON = {"content-type": "application/json"}


async def test_body_reaches_the_model_it_names_byte_by_byte(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "org/b")
    body = b'{"x": [1.50, "\\u00e9"],  "model" : "org\\/b"}'
    async with served(fleet) as client:
        headers = {**JSON, "x-request-id": "mine", "x-other": "1"}
        answer = await client.post(f"{CHAT}?beta=1", content=body, headers=headers)
    [seen] = fleet.models[0].seen
    assert seen["model"] == "org/b"
    assert (seen["path"], seen["query"]) == (CHAT, "beta=1")
    assert seen["body"].encode() == body
    assert seen["headers"]["x-request-id"] == "mine"
    assert seen["headers"]["x-other"] == "1"
    assert answer.json() == seen
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-of-model"] == "yes"
    assert len(answer.headers.get_list("content-length")) == 1


@pytest.mark.parametrize(
    ("method", "url", "body", "found"),
    [
        ("POST", "/rerank?model=b", b"{}", ("b", "/rerank", "")),
        ("GET", "/props?a=1&model=b", b"", ("b", "/props", "a=1")),
        ("GET", "/model/b/tokenizer_info?x=1", b"", ("b", "/tokenizer_info", "x=1")),
        ("GET", "/model/org/c/v1/models/org%2Fc", b"", ("org/c", "/v1/models/org/c", "")),
        ("POST", "/model/org%2Fc/tokenize", b"{}", ("org/c", "/tokenize", "")),
        ("POST", "/api/chat", b'{"model":"b:latest"}', ("b", "/api/chat", "")),
        ("POST", "/api/show", b'{"name":"b"}', ("b", "/api/show", "")),
        ("POST", CHAT, b'{"model":"nick"}', ("b", CHAT, "")),
        ("GET", "/v1/models/nick", b"", ("b", "/v1/models/nick", "")),
    ],
)
async def test_request_goes_to_the_model_that_is_named(
    tmp_path: Path, method: str, url: str, body: bytes, found: tuple[str, str, str]
) -> None:
    fleet = Fleet(tmp_path, "a", "org/c")
    fleet.catalog.add(spec_of("b", fleet.config, aliases=("nick",)))
    async with served(fleet) as client:
        answer = await client.request(method, url, content=body, headers=JSON)
    if method == "GET" and url.startswith("/v1/models"):
        assert fleet.models[0].spec.name == "b"
        return
    seen = answer.json()
    assert (seen["model"], seen["path"], seen["query"]) == found


@pytest.mark.parametrize(
    ("method", "url", "body", "kind", "status", "code"),
    [
        ("POST", CHAT, b'{"model":"no"}', "application/json", 404, "model_not_found"),
        ("POST", CHAT, b'{"model":3}', "application/json", 400, "invalid_value"),
        ("POST", CHAT, b"{", "application/json", 400, "invalid_value"),
        ("POST", CHAT, b"{}", "application/json", 400, "missing_required_parameter"),
        ("POST", CHAT, b'{"model":"a"}', "text/plain", 415, "unsupported_media_type"),
        ("GET", "/props", b"", "application/json", 400, "missing_required_parameter"),
        ("GET", "/model/no/props", b"", "application/json", 404, "model_not_found"),
        ("GET", "/v1/responses/resp_x", b"", "application/json", 404, "not_found"),
        ("POST", CHAT, b"x" * 2000, "application/json", 413, "request_too_large"),
        ("GET", "/load", b"", "application/json", 501, "path_disabled"),
    ],
)
async def test_refused_request_loads_no_model(
    tmp_path: Path, method: str, url: str, body: bytes, kind: str, status: int, code: str
) -> None:
    fleet = Fleet(tmp_path, "a", "b", max_body_bytes=1024, disabled_paths=("/load",))
    async with served(fleet) as client:
        headers = {"content-type": kind}
        answer = await client.request(method, url, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert fleet.models == []


async def test_keys_and_limits_are_those_of_all_models_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first requests_per_minute=2\nsecond\n")
    fleet = Fleet(tmp_path, "a", "b", api_key_file=str(file))
    async with served(fleet) as client:

        async def ask(model: str, key: str) -> httpx2.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post(CHAT, json={"model": model}, headers=headers)

        assert (await ask("a", "wrong")).status_code == 401
        assert fleet.models == []
        answers = [await ask(model, "first") for model in ("a", "b", "a")]
        other = await ask("a", "second")
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers[:2]] == ["1", "0"]
    assert other.status_code == 200
    assert answers[0].json()["headers"]["authorization"] == "Bearer first"


async def start_stream(client: httpx2.AsyncClient, fleet: Fleet) -> tuple[Any, Any]:
    """Return an open stream and its lines, after the first event."""
    request = client.build_request("POST", CHAT, content=STREAM, headers=JSON)
    opening = asyncio.create_task(client.send(request, stream=True))
    await eventually(lambda: bool(fleet.models and fleet.models[0].seen), "the model is asked")
    fleet.models[0].next.release()
    response = await opening
    lines = response.aiter_lines()
    assert await anext(lines) == "data: 0"
    assert await anext(lines) == ""
    return response, lines


async def test_event_of_a_stream_arrives_when_the_model_sends_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    async with served(fleet) as client:
        response, lines = await start_stream(client, fleet)
        for number in range(1, 4):
            fleet.models[0].next.release()
            assert await anext(lines) == f"data: {number}"
            assert await anext(lines) == ""
        for _ in range(1000):
            fleet.models[0].next.release()
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: 999"
        assert len(rest) == 996
        assert response.headers["content-type"].startswith("text/event-stream")
        again = await client.post(CHAT, json={"model": "a"})  # the connection goes on
    assert again.status_code == 200


async def test_client_that_leaves_ends_the_request_at_the_model(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    async with served(fleet) as client:
        response, _ = await start_stream(client, fleet)
        await response.aclose()
        await eventually(lambda: fleet.models[0].num_aborted == 1, "the model's stream ended")
        await eventually(lambda: fleet.pool.num_open == 0, "the lease is given back")


async def test_client_that_leaves_while_a_model_loads_frees_its_place(tmp_path: Path) -> None:
    def is_slow(model: FakeModel) -> None:
        model.load_may_end.clear()

    fleet = Fleet(tmp_path, "a", prepare=is_slow)
    async with served(fleet) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await client.post(CHAT, json={"model": "a"}, timeout=0.3)
        await eventually(lambda: fleet.pool.num_open == 0, "the lease is given back")


async def test_death_of_a_model_ends_its_streams_with_an_error_event(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    async with served(fleet) as client:
        await client.post(CHAT, json={"model": "b"})
        fleet.models.clear()
        _, lines = await start_stream(client, fleet)
        await fleet.models[0].die()
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert fleet.running() == ["b"]
        again = await client.post(CHAT, json={"model": "a"})
    assert again.status_code == 200
    assert int(again.headers["x-model-wait-ms"]) >= 0


async def test_death_of_a_model_before_its_answer_is_a_503(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    async with served(fleet) as client:
        request = asyncio.create_task(client.post(CHAT, content=STREAM, headers=JSON))
        await eventually(
            lambda: bool(fleet.models and fleet.models[0].seen), "the model has the request"
        )
        await fleet.models[0].die()
        answer = await request
    assert answer.status_code in (200, 503)  # the head of a stream may have arrived
    assert answer.text.count("engine_unavailable") == 1


async def test_stored_response_comes_from_the_model_that_has_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    async with served(fleet) as client:
        for name in "ab":
            await client.post("/v1/responses", json={"model": name})
        answer = await client.get("/v1/responses/resp_b")
    assert answer.json() == {"made_by": "b"}


async def test_batch_goes_to_the_model_that_has_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    (folder / "b" / "files").mkdir(parents=True)
    (folder / "b" / "files" / "file-1.json").write_text("{}")
    fleet = Fleet(tmp_path, "a", "b", batch_dir=str(folder))
    async with served(fleet) as client:
        made = await client.post("/v1/batches", json={"input_file_id": "file-1"})
        read = await client.get("/v1/files/file-1/content")
        none = await client.get("/v1/files/..%2Ffile-1")
        sent = await client.post("/v1/files?model=a", content=b"--x", headers={"x-a": "1"})
        chunked = await client.post("/v1/files?model=a", content=parts())
        lost = await client.post("/v1/files", content=b"--x")
    assert made.json()["model"] == read.json()["model"] == "b"
    assert none.status_code == 400
    assert (sent.json()["model"], sent.json()["body"]) == ("a", "--x")
    assert chunked.json()["body"] == "one two"
    assert lost.status_code == 400


async def parts() -> Any:
    yield b"one "
    yield b"two"


async def test_list_of_models_says_which_are_loaded(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    async with served(fleet) as client:
        await client.post(CHAT, json={"model": "b"})
        listed = (await client.get("/v1/models")).json()["data"]
        page = (await client.get("/")).text
        ready = (await client.get("/ready")).json()
    assert [(each["id"], each["loaded"]) for each in listed] == [("a", False), ("b", True)]
    assert listed[1]["kind"] == "decoder"
    assert '<a href="model/b/ui/">b</a>' in page
    assert (ready["status"], ready["loaded"]) == ("ok", 1)


async def test_lists_of_ollama_have_all_names_and_what_loaded_models_say(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    fleet.catalog.add(spec_of("b", fleet.config, aliases=("c",), keep_alive=3600.0))
    async with served(fleet) as client:
        for name in ("a", "c:latest"):
            await client.post(CHAT, json={"model": name})
        await fleet.models[0].die()
        await eventually(lambda: fleet.running() == ["b"], "a has ended")
        tags = (await client.get("/api/tags")).json()["models"]
        running = (await client.get("/api/ps")).json()["models"]
    listed = [(each["name"], each["model"], each.get("context_length")) for each in tags]
    assert listed == [("a", "a", None), ("b", "b", 64), ("c", "c", 64)]
    assert [(each["name"], each["context_length"]) for each in running] == [("b", 64), ("c", 64)]
    left = datetime.fromisoformat(running[0]["expires_at"]) - datetime.now(UTC)
    assert 3500 < left.total_seconds() <= 3600


async def test_models_without_an_age_of_unloading_expire_in_the_year_9999(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    async with served(fleet) as client:
        await client.post(CHAT, json={"model": "a"})
        [entry] = (await client.get("/api/ps")).json()["models"]
    assert entry["expires_at"].startswith("9999-")


async def test_version_of_ollama_is_that_of_a_server_of_one_model(tmp_path: Path) -> None:
    async with served(Fleet(tmp_path, "a", "b")) as client:
        answer = (await client.get("/api/version")).json()
    assert answer == {"version": OLLAMA_VERSION, "penstock": VERSION}


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/api/delete"), ("POST", "/api/copy"), ("POST", "/api/push")]
)
async def test_change_of_a_model_by_ollamas_api_is_refused(
    method: str, path: str, tmp_path: Path
) -> None:
    async with served(Fleet(tmp_path, "a", "b")) as client:
        answer = await client.request(method, path, json={"source": "a", "destination": "x"})
    assert answer.status_code == 400
    assert "changes no models" in answer.json()["error"]


async def test_metrics_have_the_series_of_all_models(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    async with served(fleet) as client:
        for name in "ab":
            await client.post(CHAT, json={"model": name})
        text = (await client.get("/metrics")).text
    assert 'a{model="a"} 1.0\na{model="b"} 1.0\n' in text
    assert text.count("# TYPE a counter") == 1
    assert 'penstock:model_load_seconds_count{model="a"} 1.0' in text
    assert "penstock:models_loaded 2.0" in text
    assert 'penstock:parent_http_requests_total{status="200"} 2.0' in text


@pytest.mark.parametrize(
    ("path", "fields", "due"),
    [
        ("/api/generate", {"prompt": ""}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
    ],
)
@pytest.mark.parametrize("keep_alive", [0, "0s"])
async def test_keep_alive_of_zero_unloads_the_model_that_is_named(
    tmp_path: Path, path: str, fields: dict[str, Any], due: dict[str, Any], keep_alive: int | str
) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    async with served(fleet) as client:
        for name in ("a", "b"):
            await client.post(CHAT, json={"model": name})
        body = {"model": "a:latest", "keep_alive": keep_alive, **fields}
        answer = (await client.post(path, json=body)).json()
        assert answer.pop("created_at")
        assert answer == {"model": "a", "done": True, "done_reason": "unload", **due}
        assert fleet.running() == ["b"]
        again = (await client.post(path, json=body)).json()  # it does not load it for that
        assert again["done_reason"] == "unload"
    assert len(fleet.models) == 2
    assert fleet.count("penstock:parent_model_unloads_total") == 1


@pytest.mark.parametrize("fields", [{"prompt": "Hi"}, {"keep_alive": 5}, {"keep_alive": [0]}])
async def test_other_requests_with_keep_alive_reach_the_model(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    async with served(fleet) as client:
        body = {"model": "a", "keep_alive": 0} | fields
        answer = (await client.post("/api/generate", json=body)).json()
    assert json.loads(answer["body"]) == body
