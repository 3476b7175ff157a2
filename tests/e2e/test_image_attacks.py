"""Damaged and hostile images over HTTP: an answer or a 400, and /health answers meanwhile."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest

from server.images.pool import LIMITS
from tests.support.fake_engine import FakeEngine
from tests.support.hostile_pictures import hostile, mutated
from tests.support.pictures import file_of, gradient
from tests.support.rig import Served
from tests.support.rig import serving as serving_here
from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import write_seeing

SEEDS = range(2, 12)
CONCURRENT = 6
MAX_HEALTH_S = 3.0  # on a machine with other programs; docs/images.md has the measured times
MAX_ANSWER_S = 60.0

# A process of its own: this one is busy with base64. It polls until its stdin ends.
POLLER = """
import http.client, json, select, sys, time
host = sys.argv[1]
taken = []
while not select.select([sys.stdin], [], [], 0.005)[0]:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    taken.append(time.perf_counter() - began)
    connection.close()
print(json.dumps(taken))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--dtype", "float32") as running:
        yield running


@contextlib.contextmanager
def polling_health(server: Server, taken: list[float]) -> Iterator[None]:
    """Poll /health from another process; add the seconds of each answer to `taken`."""
    host = server.base_url.removeprefix("http://")
    command = [sys.executable, "-c", POLLER, host]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as poller:
        try:
            yield
        finally:
            out, _ = poller.communicate("\n")
    assert poller.returncode == 0
    taken += json.loads(out)


def peak_of_decoders(server: Server) -> int:
    """Return the largest peak of the processes that decode, in bytes of resident memory."""
    peaks = [0]
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(OSError, psutil.Error):
            if "server.images.worker" in child.cmdline():
                status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
                peaks += [int(kib) << 10 for kib in re.findall(r"VmHWM:\s+(\d+) kB", status)]
    return max(peaks)


def body_of(data: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_hostile_images_get_an_answer_or_a_reason_and_health_answers(server: Server) -> None:
    files = [*mutated(SEEDS), *hostile()]
    bodies = [(name, json.dumps(body_of(data)).encode()) for name, data in files]
    assert len(bodies) >= 300
    outcomes: Counter[str] = Counter()
    seconds: list[float] = []
    health: list[float] = []
    memory = 0
    waiting = iter(bodies)

    async def attack(http: httpx2.AsyncClient) -> None:
        nonlocal memory
        for name, body in waiting:
            began = time.monotonic()
            response = await http.post(
                "/v1/chat/completions",
                content=body,
                headers={"content-type": "application/json"},
            )
            seconds.append(time.monotonic() - began)
            memory = max(memory, peak_of_decoders(server))
            assert response.status_code in (200, 400), (name, response.text)
            outcome = "an answer"
            if response.status_code == 400:
                error = response.json()["error"]
                outcome = error["message"]
                assert error["param"] == "messages", name
                assert 10 < len(outcome) < 300, name
                assert "ended its process" not in outcome, name
            outcomes[re.sub(r"\d+", "N", outcome)[:60]] += 1

    with polling_health(server, health):
        async with server.http() as http:
            await asyncio.gather(*(attack(http) for _ in range(CONCURRENT)))
    health.sort()
    print(f"\n{len(bodies)} images, decoders {memory >> 20} MiB, slowest {max(seconds):.2f} s")
    figures = [health[len(health) * part // 1000] * 1e3 for part in (500, 990, 999)]
    print("/health: median {:.1f} ms, p99 {:.1f} ms, p99.9 {:.1f} ms".format(*figures), end=", ")
    print(f"most {health[-1] * 1e3:.1f} ms of {len(health)}")
    print(*(f"{count:4} {outcome}" for outcome, count in outcomes.most_common()), sep="\n")
    assert outcomes["an answer"] > 20
    assert len(outcomes) > 5
    assert memory <= LIMITS.memory
    assert max(seconds) <= MAX_ANSWER_S
    assert health[-1] <= MAX_HEALTH_S
    server.wait_idle()
    assert "Traceback" not in server.log


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_one_image_in_a_thousand_requests_at_once_is_encoded_once(server: Server) -> None:
    async with server.http() as http:  # the series exists after the first step
        answer = await http.post("/v1/chat/completions", json=body_of(file_of(gradient(), "PNG")))
        assert answer.status_code == 200
    before = server.metric("images_encoded")
    body = json.dumps(body_of(file_of(gradient(width=77), "PNG"))).encode()
    headers = {"content-type": "application/json"}
    statuses: Counter[int] = Counter()
    health: list[float] = []
    limits = httpx2.Limits(max_connections=1000)

    async def ask(http: httpx2.AsyncClient) -> None:
        answer = await http.post("/v1/chat/completions", content=body, headers=headers)
        statuses[answer.status_code] += 1

    with polling_health(server, health):
        async with server.http(limits=limits) as http:
            await asyncio.gather(*(ask(http) for _ in range(1000)))
    print(f"\n{dict(statuses)}, /health at most {max(health) * 1e3:.0f} ms")
    assert statuses.total() == statuses[200] + statuses[503] == 1000
    assert statuses[200] > 100
    assert max(health) <= MAX_HEALTH_S
    assert server.metric("images_encoded") - before == 1
    server.wait_idle()


# ---- the service alone, with an engine that answers at once --------------------------------------

PNG_URL = "data:image/png;base64," + base64.b64encode(file_of(gradient(), "PNG")).decode()


def engine() -> FakeEngine:
    fake = FakeEngine(lambda request: [72])
    fake.info = msgspec.structs.replace(fake.info, vocab_size=1000, max_model_len=1024)
    return fake


def requests_with(url: Any) -> dict[str, Any]:
    """Return a body for each API whose image has this URL."""
    chat = {"type": "image_url", "image_url": {"url": url}}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    part = {"type": "input_image", "image_url": url}
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [chat]}]},
        "/v1/messages": {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1},
        "/v1/responses": {"input": [{"role": "user", "content": [part]}]},
    }


@dataclass
class Host:
    """A host of the operator's network, and the connections that it has had."""

    port: int = 0
    connections: int = 0
    answer: bytes = b""


@contextlib.asynccontextmanager
async def inner_host() -> AsyncIterator[Host]:
    host = Host()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host.connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(host.answer)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        host.port = listener.sockets[0].getsockname()[1]
        yield host


def http_answer(status: str, body: bytes = b"", *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


async def refusals(served: Served, url: str) -> list[str]:
    """Return the errors of each API, which must be a 400."""
    messages = []
    for path, body in requests_with(url).items():
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 400, (path, url, answer.text)
        messages.append(answer.json()["error"]["message"])
    return messages


async def test_no_address_is_fetched_by_default(folder: Path) -> None:
    async with inner_host() as host, serving_here(engine(), folder) as served:
        names = ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]", "0")
        urls = [f"http://{name}:{host.port}/" for name in names]
        for url in [*urls, "https://169.254.169.254/latest/meta-data", "HTTP://A.example"]:
            for message in await refusals(served, url):
                assert "fetches no images from addresses" in message
        for url in ("file:///etc/passwd", "ftp://127.0.0.1/a.png", "gopher://a/_b", "blob:x"):
            for message in await refusals(served, url):
                assert "is not supported; send a data: URL" in message
        for url in ("/etc/passwd.png", "../secret.png"):
            for message in await refusals(served, url):
                assert "Paths of files are not read" in message
        assert host.connections == 0
        assert not served.engine.requests


async def test_listed_host_is_fetched_once_and_leads_nowhere_else(folder: Path) -> None:
    async with inner_host() as host, inner_host() as other:
        hosts = (f"127.0.0.1:{host.port}", f"localhost:{other.port}")
        async with serving_here(engine(), folder, image_hosts=hosts) as served:
            url = f"http://127.0.0.1:{host.port}/a.png"
            host.answer = http_answer("200 OK", file_of(gradient(), "PNG"))
            for path, body in requests_with(url).items():
                answer = await served.http.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
            assert host.connections == 3
            host.answer = http_answer("302 Found", b"", f"location: http://127.0.0.1:{other.port}/")
            for message in await refusals(served, url):
                assert "redirect, which is not followed" in message
            # A listed name whose addresses are private, and the same address without the name.
            for message in await refusals(served, f"http://localhost:{other.port}/"):
                assert "has an address that is not public" in message
            for message in await refusals(served, f"http://127.0.0.1:{other.port}/"):
                assert "fetches no images from 127.0.0.1" in message
            assert other.connections == 0


ODD = [
    *(None, 0, -1, True, [], {}, "", " ", "data:", "data:,", "data:;base64,", "data:x"),
    *("=", "A", "%", "%00", "\0", "\udc00", "data:image/png;base64,\ud800", [PNG_URL], {"url": {}}),
    *("data:" + ";" * 5000 + ",AAAA", "data:image/png;base64," + "=" * 5000, "A" * 100_000),
    *("http:", "http://", "http://[", "http://a:99999999/", "http://\0/", "javascript:1", 1e308),
]


async def test_odd_values_in_place_of_images_are_a_400(folder: Path) -> None:
    async with serving_here(engine(), folder) as served:

        async def refused(path: str, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            answer = await served.http.post(path, content=content, headers=headers)
            assert answer.status_code == 400, (body, answer.text)
            assert answer.json()["error"]["message"]

        for odd in ODD:
            for path, body in requests_with(odd).items():
                await refused(path, body)
            for part in ({"type": "image_url", "image_url": odd}, {"type": "image_url", "x": odd}):
                body = {"messages": [{"role": "user", "content": [part]}]}
                await refused("/v1/chat/completions", body)
            for source in (odd, {"type": "base64", "data": odd}, {"type": odd, "data": "AAAA"}):
                block = {"type": "image", "source": source}
                body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
                await refused("/v1/messages", body)
        assert not served.engine.requests
        # The next picture is read.
        path, body = next(iter(requests_with(PNG_URL).items()))
        assert (await served.http.post(path, json=body)).status_code == 200


async def test_thousands_of_images_in_one_message_are_refused_before_one_is_read(
    folder: Path,
) -> None:
    part = {"type": "image_url", "image_url": {"url": PNG_URL}}
    block = {"type": "image", "source": {"type": "url", "url": PNG_URL}}
    async with serving_here(engine(), folder) as served:
        for path, parts in (("/v1/chat/completions", part), ("/v1/messages", block)):
            messages = [{"role": "user", "content": [parts] * 200}] * 20
            body = {"messages": messages, "max_tokens": 1}
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 400
            assert "4000 images; the limit is 100" in answer.json()["error"]["message"]
    assert not served.engine.requests
