"""GET /ui/api/requests: what is recorded, who sees it, and that parts sum to the wall time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.glassbox.requests.step_log import Recorder
from tests.support.fake_engine import NOT_FINITE, FakeEngine
from tests.support.rig import Served, eventually, serving

UI = {"x-penstock-ui": "1"}
PARTS = ["server", "queue", "encoder", "base", "own", "others", "waiting", "unexplained"]


def recorder_of(served: Served) -> Recorder:
    found = served.app.state.glassbox.recorder
    assert isinstance(found, Recorder)
    return found


async def chat(served: Served, request_id: str, key: str = "", **fields: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    headers = {**UI, "x-request-id": request_id}
    if key:
        headers["authorization"] = f"Bearer {key}"
    response = await served.http.post("/v1/chat/completions", json=body, headers=headers)
    # A whole answer is recorded before it is sent; a stream, after its last byte.
    recorder = recorder_of(served)
    await eventually(lambda: not recorder.open_requests, "the request is recorded")
    return response


async def get(served: Served, path: str, key: str = "") -> httpx2.Response:
    headers = {**UI, **({"authorization": f"Bearer {key}"} if key else {})}
    return await served.http.get(f"/ui/api/{path}", headers=headers)


def check_sum(report: dict[str, Any]) -> None:
    """Parts sum to the wall time exactly, as decimal numbers."""
    assert list(report["parts"]) == PARTS
    parts = [Decimal(repr(part)) for part in report["parts"].values()]
    assert sum(parts) == Decimal(repr(report["wall_ms"]))
    others = [Decimal(repr(cost)) for _, cost, *_ in report["who"]]
    assert sum(others) == Decimal(repr(report["parts"]["others"]))


@pytest.mark.parametrize("stream", [False, True])
async def test_request_with_the_header_has_a_waterfall(served: Served, stream: bool) -> None:
    await chat(served, "req-a", max_tokens=9, ignore_eos=True, stream=stream)
    report = (await get(served, "requests/req-a")).json()
    check_sum(report)
    assert (report["id"], report["state"], report["error"]) == ("req-a", "finished", None)
    [choice] = report["choices"]
    [request] = served.engine.requests
    assert choice["engine_id"] == request.id
    assert choice["prompt_tokens"] == len(request.prompt)
    assert (choice["generated_tokens"], choice["finish"]) == (9, "length")
    assert [chunk[2:] for chunk in choice["prefills"]] == [[0, len(request.prompt)]]
    assert len(report["steps"]) == 9
    stamps = [stamp for stamp in report["stamps"].values() if stamp is not None]
    assert stamps == sorted(stamps)
    assert stamps[-1] == report["wall_ms"]
    assert sum(step["prefill"] for step in report["steps"]) == len(request.prompt)
    assert sum(step["decode"] for step in report["steps"]) == 8
    assert report["who"] == []


async def test_request_without_the_header_is_not_recorded(served: Served) -> None:
    recorder = recorder_of(served)
    listeners = list(served.engine.step_listeners)
    served.engine.gate.clear()
    task = asyncio.create_task(served.chat(max_tokens=3))
    await eventually(lambda: bool(served.engine.requests), "the request is submitted")
    assert served.engine.step_listeners == listeners
    assert not recorder.open_requests
    served.engine.gate.set()
    await task
    assert not recorder.requests
    assert not recorder.steps_for_fit()
    assert (await get(served, "requests")).json() == {"requests": []}
    assert (await get(served, "requests/any")).status_code == 404


async def test_request_of_anyone_is_recorded_during_a_viewers_lease(served: Served) -> None:
    recorder = recorder_of(served)
    listeners = list(served.engine.step_listeners)
    with recorder.lease():
        response = await served.chat(max_tokens=3)
        await eventually(lambda: not recorder.open_requests, "the request has ended")
    assert served.engine.step_listeners == listeners
    await served.chat(max_tokens=3)
    [entry] = (await get(served, "requests")).json()["requests"]
    assert entry["id"] == response.headers["x-request-id"]
    assert entry["state"] == "finished"
    assert entry["generated_tokens"] == 3


async def test_running_request_is_listed_and_has_no_waterfall_yet(served: Served) -> None:
    served.engine.gate.clear()
    task = asyncio.create_task(chat(served, "req-a", max_tokens=3))
    await eventually(lambda: bool(served.engine.requests), "the request is submitted")
    [entry] = (await get(served, "requests")).json()["requests"]
    assert (entry["id"], entry["state"], entry["wall_ms"]) == ("req-a", "running", None)
    refused = await get(served, "requests/req-a")
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "request_running"
    served.engine.gate.set()
    await task
    assert (await get(served, "requests/req-a")).status_code == 200


async def test_choices_of_one_request_have_one_waterfall(served: Served) -> None:
    await chat(served, "req-a", max_tokens=4, n=3, ignore_eos=True)
    report = (await get(served, "requests/req-a")).json()
    check_sum(report)
    assert [choice["index"] for choice in report["choices"]] == [0, 1, 2]
    assert sum(step["decode"] for step in report["steps"]) == 9
    assert report["who"] == []


async def test_failed_request_is_recorded_with_its_reason(model: Path, says: Any) -> None:
    async with serving(FakeEngine(lambda request: [65, NOT_FINITE]), model) as served:
        response = await chat(served, "req-a", max_tokens=4)
        assert response.status_code == 500
        report = (await get(served, "requests/req-a")).json()
        check_sum(report)
        assert (report["state"], report["error"]) == ("aborted", "numerical")
        assert not recorder_of(served).is_leased


async def test_aborted_request_is_recorded_with_its_reason(served: Served) -> None:
    served.engine.gate.clear()
    body = {"prompt": "Hi", "max_tokens": 3}
    headers = {**UI, "x-request-id": "req-a"}
    with contextlib.suppress(httpx2.TimeoutException):
        await served.http.post("/v1/completions", json=body, headers=headers, timeout=0.2)
    recorder = recorder_of(served)
    await eventually(lambda: bool(recorder.requests), "the abort is recorded")
    served.engine.gate.set()
    report = (await get(served, "requests/req-a")).json()
    check_sum(report)
    assert (report["state"], report["error"]) == ("aborted", "disconnect")
    assert report["stamps"]["admitted"] is None
    assert report["parts"]["queue"] > 100
    assert not recorder.is_leased


async def test_refused_request_leaves_no_lease(served: Served) -> None:
    served.engine.overloaded = True
    response = await chat(served, "req-a", max_tokens=4)
    assert response.status_code in (429, 503)
    assert not recorder_of(served).is_leased
    assert not recorder_of(served).requests


async def test_stop_string_ends_the_waterfall_at_its_token(served: Served) -> None:
    await chat(served, "req-a", max_tokens=50, stop=["wö"])
    report = (await get(served, "requests/req-a")).json()
    check_sum(report)
    assert report["choices"][0]["finish"] == "stop"
    assert report["state"] == "finished"


async def test_trace_has_complete_events_of_all_phases(served: Served) -> None:
    await chat(served, "req-a", max_tokens=4, ignore_eos=True)
    response = await get(served, "requests/req-a?format=trace")
    assert 'filename="req-a.trace.json"' in response.headers["content-disposition"]
    events = response.json()["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    names = [event["name"] for event in slices]
    assert names.count("step") == 4
    assert {"request", "queue", "prefill", "decode", "detokenise"} <= set(names)
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    for event in slices:
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        assert event["tid"] in named
    whole = next(event for event in slices if event["name"] == "request")
    assert all(event["ts"] + event["dur"] <= whole["dur"] + 1 for event in slices)


async def test_unknown_format_is_refused(served: Served) -> None:
    await chat(served, "req-a", max_tokens=4)
    response = await get(served, "requests/req-a?format=csv")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "format"


async def test_routes_need_the_header(served: Served) -> None:
    for path in ("requests", "requests/any"):
        assert (await served.http.get(f"/ui/api/{path}")).status_code == 403


async def test_without_the_pages_the_header_records_nothing(model: Path, says: Any) -> None:
    async with serving(FakeEngine(says("Hello")), model, ui=False) as served:
        await chat(served, "req-a", max_tokens=4)
        assert not recorder_of(served).requests
        assert (await get(served, "requests")).status_code == 404


@pytest.fixture
async def shared(model: Path, says: Any, tmp_path: Path) -> AsyncIterator[Served]:
    """A server with two plain keys and an admin key."""
    (tmp_path / "users").write_text("alice\nbob\n")
    (tmp_path / "admins").write_text("root\n")
    files = {"api_key_file": str(tmp_path / "users"), "admin_key_file": str(tmp_path / "admins")}
    async with serving(FakeEngine(says("Hello wörld!"), delay=0.001), model, **files) as served:
        yield served


async def test_plain_key_sees_its_own_requests_only(shared: Served) -> None:
    await chat(shared, "of-alice", "alice", max_tokens=3)
    await chat(shared, "of-bob", "bob", max_tokens=3)
    assert (await get(shared, "requests/of-alice", "bob")).status_code == 404
    assert (await get(shared, "requests/of-alice", "alice")).status_code == 200
    assert (await get(shared, "requests/of-alice", "root")).status_code == 200
    seen = {}
    for key in ("alice", "bob", "root"):
        entries = (await get(shared, "requests", key)).json()["requests"]
        seen[key] = [entry["id"] for entry in entries]
    assert seen["alice"] == ["of-alice"]
    assert seen["bob"] == ["of-bob"]
    assert seen["root"] == ["of-bob", "of-alice"]


async def test_requests_of_one_id_differ_by_their_owner(shared: Served) -> None:
    await chat(shared, "same", "alice", max_tokens=3)
    await chat(shared, "same", "bob", max_tokens=5)
    for key, tokens in (("alice", 3), ("bob", 5), ("root", 5)):
        report = (await get(shared, "requests/same", key)).json()
        assert report["choices"][0]["generated_tokens"] == tokens


async def test_others_are_a_total_for_a_plain_key_and_named_for_an_admin(shared: Served) -> None:
    shared.engine.gate.clear()
    first = asyncio.create_task(chat(shared, "of-alice", "alice", max_tokens=20, ignore_eos=True))
    second = asyncio.create_task(chat(shared, "of-bob", "bob", max_tokens=20, ignore_eos=True))
    await eventually(lambda: len(shared.engine.requests) == 2, "both are submitted")
    shared.engine.gate.set()
    await asyncio.gather(first, second)
    plain = (await get(shared, "requests/of-alice", "alice")).json()
    admin = (await get(shared, "requests/of-alice", "root")).json()
    check_sum(plain)
    check_sum(admin)
    [bob] = [request.id for request in shared.engine.requests if request.id not in own_ids(plain)]
    for entry in plain["who"]:
        assert (entry[0], entry[2], entry[5]) == (None, None, None)
    assert not any(step["who"] for step in plain["steps"])
    assert any(step["more"][0] for step in plain["steps"])
    assert "of-bob" not in str(plain)
    [entry] = admin["who"]
    assert (entry[0], entry[5]) == (bob, "of-bob")
    assert any(step["who"] and step["who"][0][0] == bob for step in admin["steps"])
    trace = await get(shared, "requests/of-alice?format=trace", "alice")
    assert "of-bob" not in trace.text


def own_ids(report: dict[str, Any]) -> set[int]:
    return {choice["engine_id"] for choice in report["choices"]}
