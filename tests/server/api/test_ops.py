"""Probes, metrics, models, tokenize, and the imports of the app."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import EngineDeadError
from engine.protocol.ready import MemoryEntry, Progress
from tests.server.conftest import BOS
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import serving


async def probe(served) -> tuple[int, int, str]:
    health, ready = await served.http.get("/health"), await served.http.get("/ready")
    assert {"status", "running", "waiting", "last_step_age_s"} <= health.json().keys()
    status = health.json()["status"]
    for answer in (health, ready):
        assert (answer.headers.get("retry-after") == "5") == (answer.status_code == 503)
    full = status == "ok" and ready.status_code == 503
    assert ready.json()["status"] == ("overloaded" if full else status)
    return health.status_code, ready.status_code, status


async def test_probes_report_engine_state(served):
    engine = served.engine
    assert await probe(served) == (200, 200, "ok")
    engine.overloaded = True
    assert await probe(served) == (200, 503, "ok")
    engine.overloaded = False
    engine.drain()
    assert await probe(served) == (200, 503, "draining")
    engine.state = "ready"
    engine.die()
    assert await probe(served) == (503, 503, "dead")
    assert (await served.http.get("/v1/models")).status_code == 503


async def test_health_while_loading_shows_the_stage(served):
    assert "stage" not in (await served.http.get("/health")).json()
    served.engine.state = "loading"
    served.engine.progress = Progress("compiling kernels for this CPU, once: 3 of 7", 0.25)
    health = (await served.http.get("/health")).json()
    assert (health["stage"][-6:], health["fraction"]) == ("3 of 7", 0.25)


@pytest.mark.parametrize("host", ["", "Host: 10.1.2.3\r\n"])
async def test_probes_accept_missing_or_foreign_host(served, host):
    """HTTP/1.0 has no Host header, and a probe through a proxy may have any host."""
    for path in ("/health", "/ready"):
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(f"GET {path} HTTP/1.0\r\n{host}\r\n".encode())
        assert (await asyncio.wait_for(reader.read(-1), 10)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_head_on_get_routes_returns_empty_body(served):
    for path in (*("/health", "/ready", "/metrics", "/version"), "/v1/models", "/openapi.json"):
        got, head = await served.http.get(path), await served.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        response = await served.http.post(path, json={})
        assert response.status_code == 405
        assert response.headers["allow"] == "GET, HEAD"
    assert (await served.http.head("/v1/completions")).headers["allow"] == "POST"


async def test_routes_while_model_loads_return_503(model, says):
    engine = FakeEngine(says("x"), state="loading", info=None)
    engine.progress = Progress("reading weights", 0.25)
    async with serving(engine, model) as served:
        assert await probe(served) == (200, 503, "loading")
        body = (await served.http.get("/ready")).json()
        assert (body["stage"], body["fraction"]) == ("reading weights", 0.25)
        for path in ("/v1/models", "/v1/models/tiny"):
            response = await served.http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                "model_loading",
            )
        response = await served.http.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 503
        assert (await served.chat()).json()["error"]["code"] == "model_loading"
        engine.state, engine.info = "ready", INFO
        engine.loaded.set()
        assert (await served.chat()).status_code == 200
        assert await served.metric("cache_config_info", num_gpu_blocks="64", block_size="16") == 1
        assert await served.metric("tensor_parallel_size") == 1
        ranks = ((MemoryEntry("weights", 5, 6), MemoryEntry("largest step", 7)),)
        engine.info = msgspec.structs.replace(INFO, memory=ranks[0], other_ranks=ranks)
        assert await served.metric("tensor_parallel_size") == 2
        for rank in ("0", "1"):
            assert await served.metric("rank_memory_bytes", rank=rank, use="weights") == 6


async def test_models_with_several_names_lists_each_name(model, says):
    names = ("org/tiny", "alias")
    async with serving(FakeEngine(says("x")), model, served_model_name=names) as served:
        models = await served.openai.models.list()
        assert [m.id for m in models.data] == list(names)
        assert models.data[0].owned_by == "penstock"
        one = (await served.http.get("/v1/models/org/tiny")).json()
        assert (one["id"], one["max_model_len"]) == ("org/tiny", 512)
        response = await served.http.get("/v1/models/other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert (await served.complete(model="alias")).json()["model"] == "alias"
        assert (await served.complete()).json()["model"] == "org/tiny"
        assert (await served.complete(model="tiny")).status_code == 404


async def test_tokenize_and_detokenize_return_tokens_and_text(served, encode):
    http = served.http
    body = (await http.post("/tokenize", json={"prompt": "Hé"})).json()
    ids = [BOS, *encode("Hé")]
    assert body == {"count": 4, "max_model_len": 512, "tokens": ids, "token_strs": None}
    body = (
        await http.post(
            "/tokenize",
            json={"prompt": "H", "add_special_tokens": False, "return_token_strs": True},
        )
    ).json()
    assert (body["tokens"], body["token_strs"]) == (encode("H"), ["H"])
    messages = [{"role": "user", "content": "Hi"}]
    body = (await http.post("/tokenize", json={"messages": messages})).json()
    await served.chat(messages=messages)
    assert body["tokens"] == served.engine.requests[0].prompt
    body = (await http.post("/detokenize", json={"tokens": ids})).json()
    assert body == {"prompt": "<s>Hé", "content": "<s>Hé"}
    skip = {"tokens": ids, "skip_special_tokens": True}
    assert (await http.post("/detokenize", json=skip)).json() == {"prompt": "Hé", "content": "Hé"}
    for path, bad in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": messages}),
        ("/detokenize", {"tokens": [258]}),
        ("/detokenize", {"tokens": "x"}),
    ):
        assert (await http.post(path, json=bad)).status_code == 400


async def test_tokenize_and_detokenize_report_ignored_fields(served):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    unread = {"chat_template_kwargs": {"thinking": True}}
    for path, body, names in (
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
        ("/tokenize", {**chat, "foo": 1}, "foo"),
        ("/tokenize", {**chat, **unread}, "thinking"),
        ("/detokenize", {"tokens": [1], "foo": 1}, "foo"),
        ("/tokenize", {"prompt": "x"}, None),
        ("/detokenize", {"tokens": [1]}, None),
    ):
        response = await served.http.post(path, json=body)
        assert response.status_code == 200
        assert response.headers.get("x-ignored-params") == names


async def test_metrics_have_expected_values_and_known_labels(served):
    served.engine.delay = 0.002
    await served.chat(n=2, model="tiny")
    await served.chat(stream=True, max_tokens=3, user="somebody")
    await served.chat(temperature=9)
    await served.http.get("/" + "x" * 30)
    response = await served.http.get("/metrics")
    # Prometheus 3 refuses a scrape without a known content type.
    assert response.headers["content-type"].startswith("text/plain; version=")
    text = response.text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    ours = {name.removeprefix("penstock:"): f for name, f in families.items() if ":" in name}
    assert ours.keys() - {"batch_disk_usage_perc"} == {
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "engine_step_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "prompt_tokens"),
        *("generation_tokens", "request_success", "aborts", "rejects", "num_requests_running"),
        *("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
        *("prefix_cache_hits", "num_preemptions", "cache_config_info", "build_info"),
        *("tensor_parallel_size", "rank_memory_bytes", "spec_decode_num_drafts"),
        *("longest_sequence_tokens", "step_sequences"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("request_time_per_output_token_seconds", "request_inference_time_seconds"),
        *("request_params_max_tokens", "iteration_tokens", "http_requests", "draining"),
        *("request_params_n", "request_num_preemptions", "iteration_progress_tokens"),
        *("last_step_age_seconds", "tool_calls", "request_image_encode_time_seconds"),
    }
    closed = {"model_name", "engine", "le", "reason", "code", "finished_reason", "version"}
    closed |= {"block_size", "num_gpu_blocks", "status", "result", "rank", "use"}
    for family in ours.values():
        for sample in family.samples:
            assert sample.labels.keys() <= closed
            assert sample.labels["model_name"] == "tiny"
    prompt = len(served.engine.requests[0].prompt)
    expected = {
        "prompt_tokens_total": 3 * prompt,
        "generation_tokens_total": 2 * 14 + 3,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 2 * 13 + 2,
        "e2e_request_latency_seconds_count": 3,
        "request_queue_time_seconds_count": 3,
        "request_prefill_time_seconds_count": 3,
        "request_decode_time_seconds_count": 3,
        "request_generation_tokens_sum": 31,
        "engine_step_seconds_count": served.engine.stats.step,
        "prefix_cache_hits_total": served.engine.stats.prefix_hits,
    }
    for name, value in expected.items():
        assert await served.metric(name) == value, name
    assert await served.metric("request_success_total", finished_reason="length") == 1
    assert await served.metric("rejects_total", code="invalid_value") == 1
    assert await served.metric("rejects_total", code="not_found") == 1
    decode = await served.metric("request_decode_time_seconds_sum")
    assert decode >= 28 * 0.002


async def test_gauges_follow_engine_stats(served):
    served.engine.gate.clear()
    served.engine.stats = served.engine.stats.__class__(
        running=3, waiting=5, blocks_held=16, blocks_total=64
    )
    assert await served.metric("num_requests_running") == 3
    assert await served.metric("num_requests_waiting") == 5
    assert await served.metric("kv_cache_usage_perc") == 0.25


async def test_version_and_openapi_document_are_served(served):
    assert (await served.http.get("/version")).json()["version"]
    document = (await served.http.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert list(document["paths"]["/health"]) == ["get"]
    assert "messages" in body["content"]["application/json"]["schema"]["properties"]


async def test_engine_death_while_loading_returns_503(model, says):
    engine = FakeEngine(says("x"), state="loading", info=None)
    async with serving(engine, model) as served:
        engine.die()
        assert isinstance(engine.death, EngineDeadError)
        assert await probe(served) == (503, 503, "dead")
        assert (await served.http.get("/v1/models")).json()["error"]["code"] == "engine_unavailable"


def test_server_app_import_loads_no_torch_or_transformers():
    code = (
        "import sys, server.app; heavy = {'torch', 'transformers'} & sys.modules.keys();"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
