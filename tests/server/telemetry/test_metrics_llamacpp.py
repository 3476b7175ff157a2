"""--metrics-compat llamacpp: names, types and values of llama.cpp's series."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

COUNTERS = {
    *("prompt_tokens", "prompt_tokens_cached", "prompt_seconds", "tokens_predicted"),
    *("tokens_predicted_seconds", "n_decode", "n_tokens_max", "spec_decode_num_drafts"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
}
GAUGES = {
    *("requests_processing", "requests_deferred", "n_busy_slots_per_decode"),
    *("prompt_tokens_seconds", "predicted_tokens_seconds"),
}


@pytest.fixture
async def compatible(model: Path, says: Callable[[str], Script]) -> AsyncIterator[Served]:
    engine = FakeEngine(says("Hello"))
    async with serving(engine, model, metrics_compat="llamacpp") as running:
        engine.cached_tokens = 2
        engine.delay = 0.002
        yield running


async def values(served: Served) -> dict[str, tuple[str, float]]:
    """Return the types and values of llama.cpp's series, which have no labels."""
    text = (await served.http.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("llamacpp:"):
            [sample] = family.samples
            assert sample.labels == {}
            assert family.documentation
            found[family.name.removeprefix("llamacpp:")] = (family.type, sample.value)
    return found


async def test_names_and_types_are_llama_cpps(compatible: Served) -> None:
    found = await values(compatible)
    assert {name for name, (kind, _) in found.items() if kind == "counter"} == COUNTERS
    assert {name for name, (kind, _) in found.items() if kind == "gauge"} == GAUGES


async def test_tokens_add_up_over_requests(compatible: Served) -> None:
    computed = cached = predicted = 0
    for _ in range(2):
        answer = (await compatible.complete(prompt="abcd", max_tokens=4)).json()
        usage = answer["usage"]
        found_cached = usage["prompt_tokens_details"]["cached_tokens"]
        computed += usage["prompt_tokens"] - found_cached
        cached += found_cached
        predicted += usage["completion_tokens"]
    stats = compatible.engine.stats
    compatible.engine.stats = stats.__class__(step=stats.step, prefix_hits=cached, running=3)
    found = {name: value for name, (_, value) in (await values(compatible)).items()}
    assert found["prompt_tokens"] == computed
    assert found["prompt_tokens_cached"] == cached == 4
    assert found["tokens_predicted"] == predicted == 8
    assert found["requests_processing"] == 3
    assert found["n_decode"] > 0
    # Three of four tokens of each answer took the time between the tokens.
    rate = 6 / found["tokens_predicted_seconds"]
    assert found["predicted_tokens_seconds"] == pytest.approx(rate)
    if found["prompt_seconds"]:
        rate = computed / found["prompt_seconds"]
        assert found["prompt_tokens_seconds"] == pytest.approx(rate)


async def test_longest_sequence_is_prompt_and_answer(compatible: Served) -> None:
    for prompt, most in (("ab", 5), ("abcd", 3), ("a", 2)):
        await compatible.complete(prompt=prompt, max_tokens=most)
    text = (await compatible.http.get("/metrics")).text
    # The prompts begin with one token more than they have letters.
    assert "\nllamacpp:n_tokens_max 8.0\n" in text
    assert "# TYPE llamacpp:n_tokens_max counter\n" in text


async def test_busy_slots_are_the_mean_of_the_steps(compatible: Served) -> None:
    await compatible.complete(prompt=["ab", "cd", "ef"], max_tokens=4)
    # The three sequences start and end together.
    assert (await values(compatible))["n_busy_slots_per_decode"] == ("gauge", 3.0)
    await compatible.complete(prompt="ab", max_tokens=4)
    assert (await values(compatible))["n_busy_slots_per_decode"] == ("gauge", 2.0)


async def test_drafts_are_the_engines(compatible: Served) -> None:
    stats = compatible.engine.stats
    compatible.engine.stats = msgspec.structs.replace(stats, drafts=3, drafted=9, drafted_right=4)
    found = await values(compatible)
    assert found["spec_decode_num_drafts"] == ("counter", 3)
    assert found["spec_decode_num_draft_tokens"] == ("counter", 9)
    assert found["spec_decode_num_accepted_tokens"] == ("counter", 4)


async def test_start_time_is_a_header_of_llama_cpps_names_only(
    compatible: Served, served: Served
) -> None:
    start = (await compatible.http.get("/metrics")).headers["process-start-time-unix"]
    assert abs(int(start) - time.time()) < 600
    plain = await served.http.get("/metrics")
    assert "process-start-time-unix" not in plain.headers
    assert "llamacpp:" not in plain.text


async def test_encoded_texts_are_prompts(model: Path) -> None:
    engine = FakeEncoder(lambda request: [])
    async with serving(engine, model, metrics_compat="llamacpp") as running:
        answer = await running.http.post("/v1/embeddings", json={"input": ["a", "ba"]})
        assert answer.json()["usage"]["prompt_tokens"] == 5
        found = await values(running)
    assert found["prompt_tokens"][1] == 5
    assert found["tokens_predicted"][1] == 0
