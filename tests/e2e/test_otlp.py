"""A server with a real engine sends spans over OTLP to the collector named by OTEL_* variables."""

from __future__ import annotations

import http.server
import signal
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.serve import serving

BUDGET, PROMPT = 32, 100  # tokens


class Collector(http.server.ThreadingHTTPServer):
    """A collector that keeps the bodies posted to /v1/traces."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Take)
        self.bodies: list[bytes] = []

    def spans(self) -> list[Span]:
        requests = map(ExportTraceServiceRequest.FromString, self.bodies)
        scopes = [s for r in requests for group in r.resource_spans for s in group.scope_spans]
        return [span for scope in scopes for span in scope.spans]


class Take(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_tracing_long_prompt_sends_a_span_per_chunk(collector: Collector) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}"}
    flags = ("--tracing", "--max-num-batched-tokens", BUDGET)
    body = {"prompt": [5] * PROMPT, "max_tokens": 4, "ignore_eos": True}
    with serving("demo", *flags, env=env) as server:
        async with server.http() as client:
            answer = await client.post("/v1/completions", json=body)
        server.signal(signal.SIGTERM)
        assert server.status() == 0  # at its exit the server has sent the last spans
    assert answer.status_code == 200
    spans = {}
    for span in collector.spans():
        spans.setdefault(span.name, []).append(span)
    assert spans.keys() == {"text_completion demo", "queue", "prefill", "decode", "detokenise"}
    chunks = [{a.key: a.value.int_value for a in s.attributes} for s in spans["prefill"]]
    assert [chunk["penstock.start"] for chunk in chunks] == [0, 32, 64, 96]
    assert sum(chunk["penstock.tokens"] for chunk in chunks) == PROMPT
    times = [(s.start_time_unix_nano, s.end_time_unix_nano) for s in spans["prefill"]]
    assert times == sorted(times)
    assert times[0][0] >= spans["queue"][0].end_time_unix_nano - 1000
    assert abs(times[-1][1] - spans["decode"][0].start_time_unix_nano) < 1000
    assert all(begin < end for begin, end in times)
