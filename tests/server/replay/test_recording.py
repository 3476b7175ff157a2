"""--record: one line per finished choice of any API, and none of an aborted or failed request."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.cli.banner import banner
from server.replay.recorded import REPLAY_HEADER, RecordedAnswer, read_record
from tests.server.conftest import BOS, EOS
from tests.support.fake_engine import INFO, NOT_FINITE, FakeEngine
from tests.support.recorded import written_record
from tests.support.rig import Served, eventually, serving

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
}


async def answers_of(record_file: Path, count: int) -> list[RecordedAnswer]:
    """Wait for `count` lines and return them."""
    return list((await written_record(record_file, count)).values())


async def test_line_has_the_engine_request_and_its_tokens(
    recording: Served, record_file: Path, encode: Any
) -> None:
    body = {"prompt": "Hi", "seed": 5, "n": 2, "top_k": 3, "logit_bias": {"7": 2}}
    response = await recording.complete(**body, max_tokens=40)
    assert response.status_code == 200
    first, second = await answers_of(record_file, 2)
    sent = recording.engine.requests
    assert [each.sampling for each in (first, second)] == [request.params for request in sent]
    assert [first.sampling.seed, second.sampling.seed] == [5, 6]
    assert first.prompt_ids == sent[0].prompt == [BOS, *encode("Hi")]
    assert first.tokens == [*encode("Hello"), EOS]
    assert (first.finish, first.is_cut, first.choice, second.choice) == ("stop", False, 0, 1)
    assert first.fingerprint == response.json()["system_fingerprint"]
    capabilities = (await recording.http.get("/capabilities")).json()
    assert capabilities["system_fingerprint"] == {
        "value": first.fingerprint,
        "settings": first.settings,
    }
    assert first.id == response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_of_a_chat_is_recorded_once(
    recording: Served, record_file: Path, *, stream: bool
) -> None:
    response = await recording.chat(stream=stream)
    assert response.status_code == 200
    [found] = await answers_of(record_file, 1)
    assert found.prompt_ids == recording.engine.requests[0].prompt
    assert found.tokens[-1] == EOS


async def test_other_apis_are_recorded(recording: Served, record_file: Path) -> None:
    await recording.message()
    await recording.http.post("/v1/responses", json={"model": "tiny", "input": "Hi"})
    assert len(await answers_of(record_file, 2)) == 2


async def test_seed_that_the_server_draws_is_recorded(recording: Served, record_file: Path) -> None:
    await recording.complete()
    [found] = await answers_of(record_file, 1)
    assert found.sampling.seed == recording.engine.requests[0].params.seed > 0


async def test_answer_cut_by_a_stop_text_is_marked(
    recording: Served, record_file: Path, encode: Any
) -> None:
    await recording.complete(stop="lo", max_tokens=40)
    [found] = await answers_of(record_file, 1)
    assert found.tokens == encode("Hello")
    assert (found.finish, found.is_cut) == ("stop", True)


async def test_bad_words_and_grammar_are_recorded_as_given(
    recording: Served, record_file: Path
) -> None:
    await recording.complete(bad_words=["the"], structured_outputs={"choice": ["a", "b"]})
    [found] = await answers_of(record_file, 1)
    assert found.bad_words == ["the"]
    assert found.grammar is not None
    assert (found.grammar.kind, found.grammar.value) == ("choice", ["a", "b"])
    assert found.sampling.grammar is not None


async def test_request_for_no_tokens_is_not_recorded(recording: Served, record_file: Path) -> None:
    await recording.complete(max_tokens=0, echo=True)
    await recording.complete(max_tokens=3)
    [found] = await answers_of(record_file, 1)
    assert len(found.tokens) == 3


@pytest.mark.parametrize("path", REQUESTS)
async def test_replay_is_not_recorded(recording: Served, record_file: Path, path: str) -> None:
    body = {"model": "tiny"} | REQUESTS[path]
    answer = await recording.http.post(path, json=body, headers={REPLAY_HEADER: "1"})
    assert answer.status_code == 200
    await recording.complete(max_tokens=3)
    [found] = await answers_of(record_file, 1)
    assert len(found.tokens) == 3


async def test_aborted_request_is_not_recorded(recording: Served, record_file: Path) -> None:
    recording.engine.gate.clear()
    with contextlib.suppress(httpx2.ReadTimeout):
        await recording.http.post("/v1/completions", json={"prompt": "Hi"}, timeout=0.2)
    await eventually(lambda: bool(recording.engine.aborted), "the request is aborted")
    recording.engine.gate.set()
    await recording.complete(max_tokens=2)
    assert len(await answers_of(record_file, 1)) == 1


async def test_failed_request_is_not_recorded(model: Path, record_file: Path) -> None:
    script = [65, NOT_FINITE]
    async with serving(
        FakeEngine(lambda request: script), model, record=str(record_file)
    ) as recording:
        failed = await recording.complete(max_tokens=5, n=2)
        assert failed.status_code == 500
        await recording.complete(max_tokens=1)
        [found] = await answers_of(record_file, 1)
    assert found.tokens == [65]


async def test_full_disk_fails_no_request(model: Path, says: Any) -> None:
    async with serving(FakeEngine(says("Hello")), model, record="/dev/full") as recording:
        for _ in range(3):
            assert (await recording.complete()).status_code == 200


async def test_lines_of_the_last_requests_are_written_at_the_end(
    model: Path, says: Any, record_file: Path
) -> None:
    async with serving(FakeEngine(says("Hello")), model, record=str(record_file)) as recording:
        await asyncio.gather(*(recording.complete() for _ in range(20)))
    assert len(read_record(record_file)) == 20


async def test_without_the_flag_nothing_is_kept(model: Path, says: Any) -> None:
    async with serving(FakeEngine(says("Hello")), model) as recording:
        assert (await recording.complete()).status_code == 200
        assert recording.app.state.record is None


async def test_banner_names_the_file_of_records(
    recording: Served, served: Served, record_file: Path
) -> None:
    def shown(server: Served) -> list[str]:
        lines = banner(server.app, INFO, 8000).splitlines()
        return [line for line in lines if line.startswith("  record ")]

    [line] = shown(recording)
    assert line.endswith(f"go to {record_file}")
    assert shown(served) == []
