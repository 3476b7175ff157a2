"""Several real models behind one address: memory for two of three, a death, and the end of all."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support import web
from tests.support.process import eventually
from tests.support.serve import Server, serving
from tests.support.several import asked, three_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REQUESTS, CLIENTS = 500, 32
KINDS = ("decoder", "encoder", "translator")


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Server]:
    """A parent of three models with memory for two."""
    file = three_models(tmp_path)
    flags = ("--models-file", file, "--memory", "3GB", "--load-timeout", "300")
    with serving(*flags, "--drain-timeout", "5") as server:
        yield server


async def answer(http: httpx2.AsyncClient, kind: str, number: int) -> str:
    """Return the answer of one request as text that equal requests share. Checks a stream's end."""
    path, body = asked(kind, number)
    if not body.get("stream"):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        found = response.json()
        if kind == "encoder":
            return json.dumps([each["embedding"] for each in found["data"]])
        choice = found["choices"][0]
        return str(choice.get("message", choice).get("content", choice.get("text")))
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        data = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert data[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0] for event in data[:-1]]
    assert deltas[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content") or "" for choice in deltas)


def key_of(kind: str, number: int) -> str:
    """Return what requests with equal answers share."""
    _, body = asked(kind, number)
    return json.dumps({k: v for k, v in body.items() if k not in ("stream", "model")}) + kind


async def test_500_mixed_requests_with_memory_for_two_of_three(parent: Server) -> None:
    dice = random.Random(64)
    wanted = [(dice.choice(KINDS), number) for number in range(REQUESTS)]
    answers: dict[str, set[str]] = {}
    queue = iter(wanted)

    async with parent.http(limits=httpx2.Limits(max_connections=CLIENTS)) as http:
        http.timeout = httpx2.Timeout(600)

        async def client() -> None:
            for kind, number in queue:
                found = await answer(http, kind, number)
                answers.setdefault(key_of(kind, number), set()).add(found)

        began = time.monotonic()
        await asyncio.gather(*[client() for _ in range(CLIENTS)])
        seconds = time.monotonic() - began
    assert all(len(found) == 1 for found in answers.values()), "equal requests, equal answers"
    loads = sum(parent.metric("model_load_seconds_count", model=kind) for kind in KINDS)
    text = web.get(f"{parent.base_url}/metrics").text
    unloads = sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("penstock:parent_model_unloads_total{")
    )
    assert loads > 3
    assert unloads == loads - 2
    assert "parent_model_crashes_total{" not in text
    assert parent.metric("models_planned_bytes") <= 3e9
    print(f"{REQUESTS} requests in {seconds:.0f} s, {loads:.0f} loads, {unloads:.0f} unloads")


async def test_killed_model_gives_its_own_clients_errors_and_comes_back(parent: Server) -> None:
    async with parent.http() as http:
        long = {"max_tokens": 400, "min_tokens": 400, "stream": True}
        body = asked("decoder", 0)[1] | long
        whole = asked("translator", 0)
        first = await http.post(whole[0], json=whole[1])
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            last = max(children_of(parent), key=lambda child: child.create_time())
            last.kill()
            rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        again = await http.post(whole[0], json=whole[1])
        assert again.json()["choices"] == first.json()["choices"]
        assert parent.metric("model_load_seconds_count", model="translator") == 1
        assert await answer(http, "decoder", 0)
        assert parent.metric("model_load_seconds_count", model="decoder") == 2
        assert parent.metric("parent_model_crashes_total", model="decoder") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_nothing_is_left_when_the_parent_ends(parent: Server, number: Any) -> None:
    async with parent.http() as http:
        await answer(http, "decoder", 0)
        await answer(http, "encoder", 0)
    family = psutil.Process(parent.process.pid).children(recursive=True)
    assert len(family) >= 4, "two servers, each with an engine"
    parent.signal(number)
    assert parent.status(30) == (-9 if number == signal.SIGKILL else 0)
    eventually(lambda: not any(alive(process) for process in family), "all have ended", 10)
    assert list(parent.temp.iterdir()) == []


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children_of(parent: Server) -> list[psutil.Process]:
    found = psutil.Process(parent.process.pid).children()
    return [child for child in found if "server.cli.served_model" in child.cmdline()]
