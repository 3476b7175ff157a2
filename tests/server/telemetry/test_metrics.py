"""/metrics: our series, vLLM's names, promtool's check, and the page that documents them."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine.protocol.outputs import Admission, EngineStats, PrefillChunk, StepOutputs, TokenOutput
from loadtest.calibration import Scrape
from server.telemetry.choice_record import num_preemptions
from server.telemetry.metrics import RUNNER_GAUGES
from tests.support.fake_engine import NOT_FINITE, FakeEngine
from tests.support.prometheus import promtool
from tests.support.rig import Served, eventually, serving
from tests.support.wings import absent_wings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
# Series that dashboards, KEDA triggers and endpoint pickers for vLLM read: type, name, own labels.
VLLM = {
    "gauge": {
        "num_requests_running": set(),
        "num_requests_waiting": set(),
        "num_requests_waiting_by_reason": {"reason"},
        "kv_cache_usage_perc": set(),
        "cache_config_info": {"block_size", "num_gpu_blocks"},
    },
    "counter": {
        "prompt_tokens": set(),
        "generation_tokens": set(),
        "prefix_cache_queries": set(),
        "prefix_cache_hits": set(),
        "spec_decode_num_drafts": set(),
        "spec_decode_num_draft_tokens": set(),
        "spec_decode_num_accepted_tokens": set(),
        "num_preemptions": set(),
        "corrupted_requests": set(),
        "admission_rejections": set(),
        "request_success": {"finished_reason"},
    },
    "histogram": {
        "time_to_first_token_seconds": {"le"},
        "inter_token_latency_seconds": {"le"},
        "request_time_per_output_token_seconds": {"le"},
        "e2e_request_latency_seconds": {"le"},
        "request_queue_time_seconds": {"le"},
        "request_prefill_time_seconds": {"le"},
        "request_decode_time_seconds": {"le"},
        "request_inference_time_seconds": {"le"},
        "request_prompt_tokens": {"le"},
        "request_generation_tokens": {"le"},
        "request_params_max_tokens": {"le"},
        "request_params_n": {"le"},
        "request_num_preemptions": {"le"},
        "iteration_tokens_total": {"le"},
    },
}


@pytest.fixture
async def compatible(model, says) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("Hello")), model, metrics_compat="vllm") as served:
        await served.chat(n=2)
        yield served


async def families(served: Served) -> dict[str, Metric]:
    text = (await served.http.get("/metrics")).text
    found = list(text_string_to_metric_families(text))
    assert len({f.name for f in found}) == len(found), "a family appears twice"
    return {f.name: f for f in found}


async def test_metrics_default_has_no_vllm_names(served):
    assert not any(name.startswith("vllm:") for name in await families(served))


async def test_metrics_vllm_compat_has_vllm_names_types_and_labels(compatible):
    found = await families(compatible)
    theirs = {n.removeprefix("vllm:"): f for n, f in found.items() if n.startswith("vllm:")}
    assert theirs.keys() == {name for group in VLLM.values() for name in group}
    for kind, group in VLLM.items():
        for name, labels in group.items():
            assert theirs[name].type == kind, name
            seen = {label for sample in theirs[name].samples for label in sample.labels}
            assert seen == {"model_name", "engine"} | labels, name


async def test_metrics_vllm_compat_has_equal_values(compatible):
    found = await families(compatible)
    for name in ("generation_tokens", "request_success", "e2e_request_latency_seconds"):
        ours, theirs = found[f"penstock:{name}"], found[f"vllm:{name}"]
        strip = [(s.name.partition(":")[2], s.labels, s.value) for s in ours.samples]
        assert strip == [(s.name.partition(":")[2], s.labels, s.value) for s in theirs.samples]
    steps = {s.name: s.value for s in found["vllm:iteration_tokens_total"].samples}
    assert steps["vllm:iteration_tokens_total_count"] == compatible.engine.stats.step


def value_of(found: dict[str, Metric], name: str) -> float:
    """Return the one sample `name` without labels of its own."""
    [value] = [s.value for family in found.values() for s in family.samples if s.name == name]
    return value


async def test_metrics_vllm_compat_counts_choices_and_rejections(compatible: Served) -> None:
    await compatible.complete(prompt=["a", "b"], n=3)
    compatible.engine.overloaded = True
    assert (await compatible.complete()).status_code == 503
    found = await families(compatible)
    assert value_of(found, "vllm:request_params_n_sum") == 2 + 3
    assert value_of(found, "vllm:request_params_n_count") == 2
    assert value_of(found, "vllm:admission_rejections_total") == 1
    assert value_of(found, "vllm:request_num_preemptions_count") == 2 + 6


async def test_metrics_iteration_sum_is_that_of_prompt_and_generated_tokens(
    compatible: Served,
) -> None:
    before = value_of(await families(compatible), "vllm:iteration_tokens_total_sum")
    [observe] = compatible.engine.step_listeners
    tokens = [TokenOutput(1, 5), TokenOutput(2, 6)]
    stats = EngineStats(step=10**6, step_prefill_tokens=20, step_decode_tokens=1)
    observe(StepOutputs(0.0, tokens, [Admission(1, 0.0, 64)], stats))
    found = await families(compatible)
    assert value_of(found, "vllm:iteration_tokens_total_sum") == before + 20 + 64 + 2
    assert value_of(found, "penstock:iteration_tokens_sum") >= 21


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], 0),
        ([(0, 5)], 0),
        ([(16, 5)], 0),  # the first 16 tokens were cached
        ([(0, 5), (5, 7), (12, 1)], 0),
        ([(0, 5), (5, 7), (0, 14)], 1),
        ([(0, 5), (0, 5), (5, 7), (16, 3)], 2),
    ],
)
def test_num_preemptions_counts_prefills_that_begin_again(
    chunks: list[tuple[int, int]], expected: int
) -> None:
    assert num_preemptions([PrefillChunk(1, *chunk) for chunk in chunks]) == expected


async def test_metrics_vllm_compat_counts_waiting_and_corrupted_requests(model):
    engine = FakeEngine(lambda request: [65, NOT_FINITE])
    async with serving(engine, model, metrics_compat="vllm") as served:
        assert (await served.complete()).status_code == 500
        engine.stats = engine.stats.__class__(waiting=5)
        found = await families(served)
    [corrupted] = found["vllm:corrupted_requests"].samples
    assert (corrupted.name, corrupted.value) == ("vllm:corrupted_requests_total", 1)
    waiting = found["vllm:num_requests_waiting_by_reason"].samples
    assert {s.labels["reason"]: s.value for s in waiting} == {"capacity": 5, "deferred": 0}


async def test_stage_histograms_of_one_answer_are_consistent(served):
    served.engine.delay = 0.002
    await served.complete(max_tokens=5, ignore_eos=True)
    metric = served.metric
    decode = await metric("request_decode_time_seconds_sum")
    per_token = await metric("request_time_per_output_token_seconds_sum")
    prefill = await metric("request_prefill_time_seconds_sum")
    assert per_token == pytest.approx(decode / 4)
    inference = await metric("request_inference_time_seconds_sum")
    assert inference == pytest.approx(prefill + decode)
    assert await metric("request_params_max_tokens_sum") == 5
    await served.complete(max_tokens=1)  # no time between tokens
    assert await metric("request_time_per_output_token_seconds_count") == 1


async def test_encoders_time_is_observed_once_for_each_request_that_needs_it(
    served: Served,
) -> None:
    [observe] = served.engine.step_listeners
    metrics = observe.__self__
    encoded = Admission(1, 2.0, 0, images_encoded=2, images_ready=1.5, encode_seconds=0.25)
    reused = Admission(2, 2.0, 0, images_reused=2, images_ready=1.5)
    for admission in (encoded, reused, Admission(3, 2.0, 0)):
        metrics.begin(9, 1.0, admission, 3.0)
    name = "request_image_encode_time_seconds"
    assert await served.metric(f"{name}_count") == 1
    assert await served.metric(f"{name}_sum") == 0.25


async def test_metrics_wall_clock_jumps_change_no_interval(model, encode, monkeypatch):
    """At each call, time.time() may jump an hour forward or back."""
    jumps = itertools.cycle((0, 3600, -3600))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    limits = {"send_timeout": 2.0, "ping_interval": 2.0}
    async with serving(FakeEngine(lambda r: encode("a"), delay=0.01), model, **limits) as served:
        for stream in (False, True):
            answer = await served.complete(max_tokens=30, stream=stream)
            assert answer.status_code == 200
            assert ": ping" not in answer.text
        assert isinstance((await served.complete()).json()["created"], int)
        assert await served.metric("aborts_total") == 0
        text = (await served.http.get("/metrics")).text
    sums = {name: sample.value for name, sample in samples(text, "_seconds_sum")}
    assert len(sums) >= 6
    assert all(0 <= value < 60 for value in sums.values()), sums


def samples(text: str, ending: str) -> Iterator[tuple[str, Sample]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(ending):
                yield sample.name, sample


async def test_calibration_scrape_parses_our_metrics(served):
    """loadtest/calibration.py reads the work of its simulator's processes here."""

    async def scrape() -> Scrape:
        return Scrape.parse(0.0, (await served.http.get("/metrics")).text)

    before = await scrape()
    body = {"prompt": "abcdefgh", "max_tokens": 5, "ignore_eos": True}
    answer = await served.http.post("/v1/completions", json=body)
    generated = answer.json()["usage"]["completion_tokens"]
    after = await scrape()
    assert after.tokens - before.tokens == generated
    assert after.requests - before.requests == 1
    assert after.steps > before.steps
    assert after.running == before.running == 0


async def test_http_requests_are_counted_by_final_status(served):
    async def counted() -> dict[str, float]:
        samples = (await families(served))["penstock:http_requests"].samples
        return {s.labels["status"]: s.value for s in samples if s.name.endswith("_total")}

    assert await counted() == {"200": 0, "500": 0, "503": 0}  # probes are not counted
    await served.complete()
    await served.complete(temperature=9)
    served.engine.overloaded = True
    await served.complete()
    served.engine.overloaded = False
    served.engine.script = lambda request: [65, NOT_FINITE]
    assert (await served.complete(stream=True)).status_code == 200, (
        "the status line was sent already"
    )
    assert await counted() == {"200": 1, "400": 1, "500": 1, "503": 1}


async def test_http_requests_client_disconnect_counts_as_499(served):
    served.engine.gate.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await served.complete()
    for _ in range(200):
        if await served.metric("http_requests_total", status="499"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no 499 was counted")


async def test_http_requests_stream_cut_by_drain_counts_as_503(served):
    served.engine.gate.clear()
    asking = asyncio.create_task(served.complete(stream=True))
    await eventually(lambda: served.engine.busy, "the request runs")
    served.engine.burst = 1
    served.engine.delay = 60
    served.engine.gate.set()  # one token, so that the answer has started
    await eventually(lambda: served.engine.stats.step == 1, "a token arrives")
    await asyncio.sleep(0.1)
    served.engine.drain()
    served.engine.die()
    assert '"code":"shutting_down"' in (await asking).text
    assert await served.metric("http_requests_total", status="503") == 1
    assert await served.metric("http_requests_total", status="500") == 0


async def test_draining_gauge_is_1_during_drain(served):
    assert await served.metric("draining") == 0
    served.engine.drain()
    assert await served.metric("draining") == 1


async def test_contention_gauges_exist_only_if_measured(served):
    assert "penstock:engine_cpu_contention" not in await families(served), "absent if not measured"
    stats = replace(
        served.engine.stats, gauges={"engine_cpu_contention": 0.45, "engine_cpu_contended": 1.0}
    )
    served.engine.stats = stats
    assert await served.metric("engine_cpu_contention") == 0.45
    assert await served.metric("engine_cpu_contended") == 1


async def test_metrics_exposition_passes_promtool(compatible):
    exposition = (await compatible.http.get("/metrics")).text
    status, said = await asyncio.to_thread(promtool, "check", "metrics", stdin=exposition)
    # Status 3 means style warnings. The colon and the histogram named _total are vLLM's style.
    assert status == 3, said
    style = re.compile(
        r"\S+ metric names should not contain ':'"
        r'|vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    )
    assert [line for line in said.splitlines() if line and not style.fullmatch(line)] == []


async def test_metrics_page_lists_exactly_the_exported_series(served):
    listed = {}
    for line in PAGE.read_text().splitlines():
        if match := re.match(r"\| `(penstock:\w+|process_\w+)(?:\{(\S*)\})?` \| (\w+) \|", line):
            listed[match[1].removesuffix("_total")] = (match[2] or "", match[3])
    served.engine.stats = replace(served.engine.stats, gauges=dict.fromkeys(RUNNER_GAUGES, 0.0))
    found = await families(served)
    assert found.keys() <= listed.keys()
    assert listed.keys() == found.keys() or absent_wings()
    for name in found:
        labels, kind = listed[name]
        assert found[name].type == kind, name
        own = {label for sample in found[name].samples for label in sample.labels}
        assert own - {"model_name", "engine", "le"} == set(labels.split(",")) - {""}, name
