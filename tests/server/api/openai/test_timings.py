"""`metrics` of a response, as in vLLM with --enable-per-request-metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from server.api.openai.timings import metrics_field
from server.generation.events import Timings, Usage
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

NAMES = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms"}


def test_metrics_field_has_the_rates() -> None:
    timings = Timings(9.0, 64, 36, 20.0, 31, 60.0, 30)
    assert metrics_field(Usage(100, 31, 64, timings=timings)) == {
        "metrics": {
            "queue_time_ms": 9.0,
            "time_to_first_token_ms": 20.0,
            "generation_time_ms": 60.0,
            "mean_itl_ms": 2.0,
            "tokens_per_second": 387.5,
        }
    }
    one = metrics_field(Usage(1, 1, 0, timings=Timings(0.0, 0, 1, 4.0, 1, 0.0, 0)))["metrics"]
    assert "mean_itl_ms" not in one
    assert one["tokens_per_second"] == 250.0
    assert metrics_field(Usage(1, 1, 0)) == {}


async def test_metrics_come_with_the_whole_answer_or_the_usage_of_a_stream(
    model: Path, says: Callable[[str], Script]
) -> None:
    engine = FakeEngine(says("Hello"))
    async with serving(engine, model, enable_per_request_metrics=True) as reporting:
        assert (await reporting.complete()).json()["metrics"].keys() >= NAMES
        assert (await reporting.chat()).json()["metrics"].keys() >= NAMES
        stream = await reporting.chat(stream=True, stream_options={"include_usage": True})
        *chunks, last, done = [part for part in stream.text.split("\n\n") if part]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["metrics"].keys() >= NAMES
        assert all('"metrics"' not in chunk for chunk in chunks)


async def test_metrics_are_absent_by_default(served: Served) -> None:
    assert "metrics" not in (await served.chat()).json()
