"""Make the first call of a function fail, then the second, and so on, until no call fails.

Each time every client must get a response or an error, and all resources must be freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import zmq

from engine.client.channel import ClientEndpoint, EngineEndpoint
from engine.client.client import ProcessClient
from engine.config import EngineConfig
from engine.runner.load import LoadedEngine, load_engine
from engine.runner.model_runner import ModelRunner
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.scheduler import Scheduler
from server.api.openai.writer import OpenAIWriter
from server.generation.generation import Generation
from server.telemetry.metrics import Metrics
from server.text.chat_template import ChatTemplate
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer
from tests.server.conftest import BOS, TEMPLATE, byte_tokenizer
from tests.support.driver import tiny_llama
from tests.support.rig import Served, check_error_body, eventually, serving
from tests.support.thorough import is_thorough
from tests.support.thread_engine import ThreadChild

MANY = 200  # no scenario calls a function this often
HANGS_S = 30
OOM = torch.OutOfMemoryError("secret at /home/x 0x7f00")
BUG = RuntimeError("secret at /home/x 0x7f00")
NO_BUFFERS = zmq.ZMQError(105)

# (class, method, exception): a fault in OF_A_REQUEST fails one request, a fault in OF_THE_ENGINE
# ends the engine.
Seam = tuple[type, str, Exception]
OF_A_REQUEST: list[Seam] = [
    (ClientEndpoint, "send", NO_BUFFERS),
    (Tokenizer, "encode", BUG),
    (ChatTemplate, "render", BUG),
    (Generation, "_request", BUG),
    (Generation, "_token", BUG),
    (Detokenizer, "push", BUG),
    (Metrics, "finish", BUG),
    (OpenAIWriter, "_entry", BUG),
    (OpenAIWriter, "_head", BUG),
]
OF_THE_ENGINE: list[Seam] = [
    (ModelRunner, "launch", OOM),
    (Scheduler, "schedule", BUG),
    (Scheduler, "retire", BUG),
    (BlockTables, "extend", BUG),
    (EngineEndpoint, "send", NO_BUFFERS),
    (EngineEndpoint, "drain", NO_BUFFERS),
    (ProcessClient, "_on_step", BUG),
]


class Fault:
    """Make the n-th call of a method, counted from now, fail."""

    def __init__(self, patch: pytest.MonkeyPatch, seam: Seam, n: int) -> None:
        owner, name, error = seam
        original, self._left = getattr(owner, name), n

        def call(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise error.with_traceback(None)  # the same exception, without the old traceback
            return original(*args, **options)

        patch.setattr(owner, name, call)

    @property
    def came(self) -> bool:
        return self._left <= 0


@dataclass(frozen=True)
class Service:
    client: ProcessClient
    child: ThreadChild
    served: Served
    idle: frozenset[asyncio.Task[Any]]

    def is_clean(self) -> bool:
        assert self.child.core is not None
        scheduler, client = self.child.core.scheduler, self.client
        known = (client._streams, client._queue._waiting, client._queue._expected)
        tasks = asyncio.all_tasks() - self.idle - {asyncio.current_task()}
        alive = self.child.thread.is_alive()
        held = alive and (
            scheduler.has_work or scheduler.pool.num_available < scheduler.pool.num_blocks
        )
        return not any((*known, tasks, held))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama(
        tmp_path_factory.mktemp("models") / "tiny", vocab_size=258, bos_token_id=BOS
    )
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    """A config with so few KV blocks that four requests of three blocks each do not fit."""
    sizes = {"block_size": 16, "num_gpu_blocks_override": 8, "max_model_len": 64}
    return EngineConfig(model=str(folder), dtype="float32", threads=1, device="cpu", **sizes)


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedEngine:
    return load_engine(config)


@contextlib.asynccontextmanager
async def service(config: EngineConfig, loaded: LoadedEngine) -> AsyncIterator[Service]:
    child = ThreadChild(config, loaded)
    client = ProcessClient(config, child)  # type: ignore[arg-type]
    async with serving(client, Path(config.model)) as served:  # type: ignore[arg-type]
        await client.wait_ready()
        await stream(served)  # the first stream starts a permanent task of the SSE library
        idle = asyncio.all_tasks() - {asyncio.current_task()}
        yield Service(client, child, served, frozenset(idle))


# ---- what clients do ------------------------------------------------------------------------

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


def whole(response: httpx2.Response) -> int:
    """Return the status. The rig has already checked the body of an error."""
    assert response.status_code in (200, 500, 503), response.text
    return response.status_code


async def chat(served: Served) -> list[int]:
    return [whole(await served.chat(**MESSAGES))]


async def several(served: Served) -> list[int]:
    answer = await served.complete(n=2, max_tokens=3)
    return [whole(answer)]


async def stream(served: Served) -> list[int]:
    """Read a stream, which must end with [DONE] or an error event."""
    text = ""
    async with served.http.stream(
        "POST", "/v1/chat/completions", json=MESSAGES | {"stream": True}
    ) as response:
        if response.status_code != 200:
            return [response.status_code]
        async for part in response.aiter_text():
            text += part
    assert text.endswith("\n\n")
    last = text.strip().split("\n\n")[-1].removeprefix("data: ")
    if last == "[DONE]":
        return [200]
    error = json.loads(last)
    status = 503 if error["error"]["code"] == "engine_unavailable" else 500
    check_error_body(error, status)
    return [status]


async def leaving(served: Served) -> list[int]:
    reader, writer = await asyncio.open_connection(*served.address)
    body = json.dumps(MESSAGES | {"stream": True, "max_tokens": 40}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n".encode())
    writer.write(body)
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return [200]


async def preempted(served: Served) -> list[int]:
    """Four sequences that outgrow the KV blocks, and another request at the same time."""
    prompts = [letter * 30 for letter in "abcd"]
    crowd = served.http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 8})
    return [whole(response) for response in await asyncio.gather(crowd, served.chat(**MESSAGES))]


SCENARIOS: dict[str, Callable[[Served], Awaitable[list[int]]]] = {
    "chat": chat,
    "stream": stream,
    "several": several,
    "leaving": leaving,
    "preempted": preempted,
}
SLOWLY = pytest.param("preempted", marks=pytest.mark.slow)  # it makes many calls


def named(seam: Seam) -> str:
    return f"{seam[0].__name__}.{seam[1]}"


def calls() -> Iterator[int]:
    """Yield the number of each call, or of ever fewer calls in the short run."""
    n = 1
    while n < MANY:
        yield n
        n += 1 if is_thorough() else 1 + n // 4


async def suffer(running: Service, scenario: str) -> list[int]:
    async with asyncio.timeout(HANGS_S):
        return await SCENARIOS[scenario](running.served)


@pytest.mark.parametrize("scenario", [s if s != "preempted" else SLOWLY for s in SCENARIOS])
@pytest.mark.parametrize("seam", OF_A_REQUEST, ids=named)
@pytest.mark.variants(4)
async def test_fault_in_one_request_fails_only_that_request(
    config: EngineConfig, loaded: LoadedEngine, scenario: str, seam: Seam
) -> None:
    async with service(config, loaded) as running:
        for n in range(1, MANY):
            with pytest.MonkeyPatch.context() as patch:
                fault = Fault(patch, seam, n)
                codes = await suffer(running, scenario)
                await eventually(running.is_clean, f"clean after call {n}")
            assert running.client.state == "ready"
            assert codes.count(200) >= len(codes) - fault.came, (n, codes)
            if not fault.came:
                break
        else:
            pytest.fail("the scenario calls this function more than MANY times")
        assert scenario != "preempted" or running.client.stats.preemptions > 0


@pytest.mark.parametrize("scenario", ["stream", "leaving", SLOWLY])
@pytest.mark.parametrize("seam", OF_THE_ENGINE, ids=named)
@pytest.mark.variants(4)
async def test_fault_in_engine_fails_all_requests_with_503(
    config: EngineConfig, loaded: LoadedEngine, scenario: str, seam: Seam
) -> None:
    for n in calls():
        async with service(config, loaded) as running:
            with pytest.MonkeyPatch.context() as patch:
                fault = Fault(patch, seam, n)
                codes = await suffer(running, scenario)
                await eventually(running.is_clean, f"clean after call {n}")
            assert set(codes) <= {200, 503}, (n, codes)
            if not fault.came:
                return
            await eventually(lambda: running.client.state == "dead", "the death is known")
            assert (await running.served.chat()).status_code == 503
    pytest.fail("the scenario calls this function more than MANY times")
