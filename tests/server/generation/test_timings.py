"""Timings: computed from the stamps, returned on request, and in the Server-Timing header."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.protocol.outputs import Admission
from server.api.openai.timings import timing_fields
from server.generation.events import Timings, Usage
from server.generation.timings import Timeline, timings_of
from tests.support.rig import Served

USAGE = Usage(prompt_tokens=100, completion_tokens=30, cached_tokens=64)
NAMES = [
    "cache_n",
    *("prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
]


def chunks_of(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.strip()]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_timings_span_all_choices() -> None:
    timelines = [Timeline(2.0, 2.5), Timeline(2.25, 4.0), Timeline()]
    admissions = [Admission(7, 1.75, 0), Admission(8, 1.5, 64)]
    assert timings_of(1.0, admissions, timelines, USAGE) == Timings(
        queue_ms=500,
        cached_tokens=64,
        prompt_tokens=36,
        prompt_ms=500,
        generated_tokens=30,
        generation_ms=2000,
        timed_tokens=28,
    )


def test_timings_before_the_first_token_are_zero() -> None:
    timings = timings_of(1.0, [], [Timeline()], Usage(100, 0, 0))
    assert (timings.queue_ms, timings.prompt_ms, timings.generation_ms) == (0, 0, 0)
    fields = timing_fields(timings)
    assert fields["predicted_per_second"] == fields["prompt_per_second"] == 0


def test_timing_fields_have_the_rates() -> None:
    fields = timing_fields(Timings(9.0, 64, 36, 18.0, 31, 60.0, 30))
    assert list(fields) == NAMES
    assert list(fields.values()) == [64, 36, 18, 0.5, 2000, 31, 60, 2, 500]


async def test_timings_are_in_a_whole_answer_only_on_request(served: Served) -> None:
    served.engine.cached_tokens = 2
    served.engine.delay = 0.002
    for name in ("timings", "timings_per_token"):
        timings = (await served.complete(n=2, **{name: True})).json()["timings"]
        assert list(timings) == NAMES
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (2, 1, 28)
        assert timings["predicted_ms"] > 10
        assert timings["predicted_per_second"] > 0
    for fields in ({}, {"timings": False}):
        assert "timings" not in (await served.chat(**fields)).json()


async def test_timings_are_in_the_last_chunk_of_a_choice(served: Served) -> None:
    for ask in (served.chat, served.complete):
        chunks = chunks_of((await ask(stream=True, timings=True)).text)
        assert [n for n, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["timings"]["predicted_n"] == 14


async def test_timings_per_token_are_in_each_update(served: Served) -> None:
    served.engine.delay = 0.001
    chunks = chunks_of((await served.complete(stream=True, timings_per_token=True)).text)
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert counts == sorted(counts)
    assert len(counts) > 5
    assert counts[-1] == 14


@pytest.mark.parametrize("stream", [False, True])
async def test_server_timing_has_the_phases_of_a_whole_answer(served: Served, stream: bool) -> None:
    answer = await served.complete(stream=stream)
    found = re.findall(r"(\w+);dur=([0-9.]+)", answer.headers["server-timing"])
    due = ["total"] if stream else ["queue", "prefill", "decode", "total"]
    assert [name for name, _ in found] == due
    assert float(found[-1][1]) == float(answer.headers["openai-processing-ms"])
