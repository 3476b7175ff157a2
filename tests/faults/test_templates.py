"""Hostile chat templates: the server goes on, and the template gets its limits and no more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest

from engine.errors import ConfigError
from server import exit_codes
from server.text.render_pool import LIMITS
from tests.server.conftest import encode, model, says
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served
from tests.support.rig import serving as serving_here
from tests.support.serve import serving
from tests.support.template_attacks import ATTACKS

__all__ = ["encode", "model", "says"]

HEARTBEAT_S = 0.005
MAX_HELD_S = 0.05
SLACK_S = 1.0  # for the client, and for two shared cores
CHAT = {"messages": [{"role": "user", "content": "x" * 50_000}]}
ENDLESS = "{{ (messages | length + 0.5) | round(2000000000, 'ceil') }}"  # holds the GIL


@dataclass
class Observed:
    held: float = 0.0  # longest time that the event loop was held, in seconds
    memory: int = 0  # peak of a child's resident memory, in bytes
    probes: list[int] = field(default_factory=list)


@contextlib.contextmanager
def watching_memory(observed: Observed) -> Iterator[None]:
    """Record the memory of this process's children."""
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(0.01):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    observed.memory = max(observed.memory, child.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextlib.asynccontextmanager
async def watching_loop(observed: Observed, served: Served) -> AsyncIterator[None]:
    """Record how long the event loop is held, and what /health answers."""

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            observed.held = max(observed.held, time.monotonic() - began - HEARTBEAT_S)

    async def probe() -> None:
        while True:
            observed.probes.append((await served.http.get("/health")).status_code)
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(beat()), group.create_task(probe())]
        await asyncio.sleep(0.05)
        yield
        for task in tasks:
            task.cancel()


async def attack(source: str, folder: Path, script: Script, observed: Observed) -> tuple[int, str]:
    """Serve with a template and send a chat. Return the status and the error; 0 for no start."""
    template = folder / "attack.jinja"
    template.write_text(source, encoding="utf-8")
    try:
        context = serving_here(FakeEngine(script), folder, chat_template=str(template))
        served = await context.__aenter__()
    except ConfigError as error:
        return 0, str(error)
    try:
        await served.chat()  # the first request of a server imports modules
        gc.freeze()  # as `penstock serve` does: a full collection of torch's modules takes 95 ms
        async with watching_loop(observed, served):
            answer = await served.http.post("/v1/chat/completions", json=CHAT)
        return answer.status_code, answer.json().get("error", {}).get("message", "")
    finally:
        gc.unfreeze()
        await context.__aexit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "source"), ATTACKS)
async def test_attack_stays_within_the_limits(
    kind: str, source: str, model: Path, says: Callable[[str], Script]
) -> None:
    observed = Observed()
    began = time.monotonic()
    with watching_memory(observed):
        status, message = await attack(source, model, says("x"), observed)
    took = time.monotonic() - began
    print(f"{kind}: {status} {took:.2f} s {observed.memory >> 20} MiB "
          f"held {observed.held * 1e3:.0f} ms {source[:50]!r} {message[:90]}")  # fmt: skip
    assert status in (0, 200, 400)
    if status == 200:
        assert kind not in ("import", "attribute") or "__" not in source
    assert observed.memory <= LIMITS.memory
    assert observed.held <= MAX_HELD_S
    assert set(observed.probes) <= {200}


@pytest.mark.slow
async def test_endless_template_is_ended_and_sigterm_is_obeyed(tmp_path: Path) -> None:
    """/health answers meanwhile. Two chats at once occupy both processes."""
    template = tmp_path / "endless.jinja"
    template.write_text(f"{{% if messages | length == 1 %}}{ENDLESS}{{% endif %}}Hello")
    one = json.loads(json.dumps({**CHAT, "max_tokens": 2}))
    two = {**one, "messages": one["messages"] * 2}
    with serving("demo", "--chat-template", str(template)) as server:
        async with httpx2.AsyncClient(base_url=server.base_url, timeout=60) as client:

            async def chat(body: object) -> int:
                return (await client.post("/v1/chat/completions", json=body)).status_code

            assert await chat(two) == 200
            began = time.monotonic()
            running = [asyncio.create_task(chat(one)) for _ in range(2)]
            while not all(task.done() for task in running):
                asked = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                assert time.monotonic() - asked < SLACK_S
                await asyncio.sleep(0.02)
            assert {task.result() for task in running} == {400}
            assert time.monotonic() - began < LIMITS.seconds + 2 * SLACK_S
            assert await chat(two) == 200  # the processes were replaced
            last = asyncio.create_task(chat(one))
            await asyncio.sleep(0.3)
            server.signal(signal.SIGTERM)
            assert await last == 400
        assert server.status() == exit_codes.CLEAN
