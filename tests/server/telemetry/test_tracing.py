"""Spans describe a request, agree with the metrics, and contain no prompt or answer text."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.app import create_app
from server.config import ServerConfig
from server.generation.observers import spine_observers
from server.telemetry.tracing import Tracing
from tests.support.fake_engine import NOT_FINITE, FakeEngine
from tests.support.rig import Served, eventually, serving

TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}


@dataclass
class Traced:
    served: Served
    exporter: InMemorySpanExporter

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def root(self) -> ReadableSpan:
        [root] = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return root

    async def come(self, count: int) -> None:
        """Wait for `count` spans. They end after the answer is sent, perhaps after the client has
        received it."""
        await eventually(lambda: len(self.spans) >= count, "the spans are recorded")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@pytest.fixture
async def traced(model, says) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    async with serving(FakeEngine(says("Hello wörld!"), delay=0.002), model) as served:
        tracing = Tracing(SimpleSpanProcessor(exporter))
        state = served.app.state.penstock
        observers = spine_observers(served.app.state.metrics, tracing)
        served.app.state.penstock = dataclasses.replace(state, observers=observers)
        yield Traced(served, exporter)
        await asyncio.to_thread(tracing.close)


async def test_trace_of_chat_has_root_span_and_one_span_per_stage(traced):
    await traced.served.chat(max_tokens=9, temperature=0.5, top_p=0.9, ignore_eos=True)
    await traced.come(5)
    root, prompt = traced.root, traced.served.engine.requests[0].prompt
    assert root.name == "chat tiny"
    assert root.resource.attributes["service.name"] == "penstock"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.input_tokens": len(prompt),
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert expected.items() <= dict(root.attributes).items()
    assert root.status.status_code is StatusCode.UNSET
    stages = [span for span in traced.spans if span is not root]
    assert [span.name for span in stages] == ["queue", "prefill", "decode", "detokenise"]
    for span in stages:
        assert span.parent.span_id == root.context.span_id
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    assert traced.named("prefill")[0].attributes["penstock.tokens"] == len(prompt)
    assert abs(time.time_ns() - root.end_time) < 10e9, "times are not Unix times"


@pytest.mark.parametrize("stream", [False, True])
async def test_span_durations_equal_metrics(traced, stream):
    await traced.served.complete(n=2, stream=stream, max_tokens=5)
    await traced.come(9)
    assert traced.root.name == "text_completion tiny"
    metric = traced.served.metric
    for name, series in (
        ("queue", "request_queue_time_seconds"),
        ("decode", "request_decode_time_seconds"),
    ):
        spans = traced.named(name)
        assert {span.attributes["penstock.choice"] for span in spans} == {0, 1}
        observed = await metric(f"{series}_sum")
        assert sum(map(seconds, spans)) == pytest.approx(observed, abs=1e-6)
    # From the arrival to the end of each choice's detokenisation.
    ends = [span.end_time - traced.root.start_time for span in traced.named("detokenise")]
    assert sum(ends) / 1e9 == pytest.approx(await metric("e2e_request_latency_seconds_sum"), 1e-3)


async def test_trace_with_traceparent_continues_the_callers_trace(traced):
    await traced.served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=CALLER)
    await traced.come(5)
    root = traced.root
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == PARENT


async def test_trace_with_unsampled_traceparent_is_not_recorded(traced):
    unsampled = {"traceparent": CALLER["traceparent"][:-1] + "0"}
    await traced.served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=unsampled)
    assert traced.spans == []


async def test_trace_of_failed_request_has_error_status(traced):
    traced.served.engine.script = lambda request: [65, NOT_FINITE]
    await traced.served.complete()
    await eventually(
        lambda: any(s.kind is SpanKind.SERVER for s in traced.spans), "the root span is recorded"
    )
    assert traced.root.status.status_code is StatusCode.ERROR
    assert traced.root.attributes["error.type"] == "numerical"
    assert traced.root.attributes["gen_ai.response.finish_reasons"] == ()


async def test_trace_of_request_never_admitted_has_only_queue_span(traced):
    traced.served.engine.gate.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await traced.served.complete()
    await traced.come(2)
    [queue] = [span for span in traced.spans if span is not traced.root]
    assert queue.name == "queue"
    assert seconds(queue) > 0.1
    assert traced.root.attributes["error.type"] == "disconnect"


async def test_spans_contain_no_prompt_or_answer_text(traced):
    secret = {
        "user": "SECRET4",
        "stop": ["SECRET5"],
        "metadata": {"a": "SECRET6"},
        "logprobs": True,
    }
    message = {"role": "user", "name": "SECRET2", "content": "SECRET1"}
    for stream in (False, True):
        chat = await traced.served.chat(messages=[message], stream=stream, **secret)
        echo = {"echo": True, "stream": stream}
        completion = await traced.served.complete(prompt="SECRET3", **echo)
        assert (chat.status_code, completion.status_code) == (200, 200), chat.text + completion.text
    traced.served.engine.script = lambda request: [NOT_FINITE]
    await traced.served.complete(prompt="SECRET3")
    await traced.come(22)
    text = "".join(span.to_json() for span in traced.spans)
    for word in ("SECRET", "Hello", "wörld", "w\\u00f6rld"):
        assert word not in text
    known = {"penstock.request_id", "penstock.choice", "penstock.start", "penstock.tokens"}
    for span in traced.spans:
        for name in span.attributes:
            assert name.startswith("gen_ai.") or name in known | {"error.type"}, name


# ---- whether there is a tracer at all ---------------------------------------------------------


async def test_tracing_is_off_by_default(served):
    assert served.app.state.tracing is None


def test_tracing_without_extra_raises_error_naming_the_package(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    config, engine = ServerConfig(tracing=True), EngineConfig(model=str(model))
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[otel\]'"):
        create_app(config, engine, FakeEngine(lambda request: [65]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ],
)
def test_from_environment_unsupported_protocol_raises_error_naming_it(name, value):
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        Tracing.from_environment({name: value})


def test_from_environment_empty_variable_counts_as_unset():
    Tracing.from_environment(
        {"OTEL_TRACES_EXPORTER": "", "OTEL_EXPORTER_OTLP_PROTOCOL": ""}
    ).close()


class Stuck(SpanProcessor):
    """A span processor for an unreachable collector: its shutdown blocks."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def shutdown(self) -> None:
        self.release.wait(60)


def test_close_with_unreachable_collector_returns_in_time():
    stuck = Stuck()
    tracing, began = Tracing(stuck), time.monotonic()
    tracing.close()
    assert time.monotonic() - began < 20
    stuck.release.set()
