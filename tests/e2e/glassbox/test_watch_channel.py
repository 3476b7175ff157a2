"""The messages between the two processes: with the pages, without them, and with a viewer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from engine.checkpoint.folder import model_folder
from engine.client import channel
from engine.client.client import ProcessClient
from engine.config import EngineConfig
from engine.protocol.watch import Blocks, StepTrace, Watch
from engine.runner.load import LoadedEngine, load_engine
from tests.support.rig import Served, serving
from tests.support.thread_engine import ThreadChild
from tests.support.watched import UI, reading

FOLDER = model_folder("demo")


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(model=str(FOLDER), dtype="float32", threads=1, device="cpu")


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedEngine:
    return load_engine(config)


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """All messages of both directions that are sent meanwhile."""
    sent: list[Any] = []

    def send(self: Any, message: Any, flags: int = 0) -> None:
        sent.append(message)
        original(self, message, flags)

    original = channel._Outbox.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel._Outbox, "send", send)
        yield sent


@contextlib.asynccontextmanager
async def service(
    config: EngineConfig, loaded: LoadedEngine, *, ui: bool
) -> AsyncIterator[tuple[Served, ThreadChild]]:
    child = ThreadChild(config, loaded)
    client = ProcessClient(config, child)  # type: ignore[arg-type]
    async with serving(client, FOLDER, ui=ui) as served:  # type: ignore[arg-type]
        await client.wait_ready()
        yield served, child


async def run(served: Served) -> None:
    """Send requests one after the other, so that each step is the same in every run."""
    for seed in range(4):
        body = {"prompt": [9] * (70 * seed + 3), "max_tokens": 12, "seed": seed}
        body["ignore_eos"] = True
        response = await served.http.post("/v1/completions", json=body)
        assert response.status_code == 200
    bad = await served.http.post("/v1/completions", json={"prompt": [9] * 20_000})
    assert bad.status_code == 400


def masked(messages: list[Any]) -> list[bytes]:
    """The bytes of messages whose times are 0. A watched engine's own messages are left out."""

    def mask(value: Any) -> Any:
        if isinstance(value, list):
            return [mask(inner) for inner in value]
        if isinstance(value, dict):
            # The runner's gauges are measurements of the machine.
            return {key: mask(inner) for key, inner in value.items() if not isinstance(key, str)}
        return 0.0 if isinstance(value, float) else value

    plain = [m for m in messages if not isinstance(m, StepTrace | Blocks | Watch)]
    wires = [msgspec.msgpack.decode(msgspec.msgpack.encode(message)) for message in plain]
    return [msgspec.msgpack.encode(mask(wire)) for wire in wires]


async def test_unwatched_channel_has_the_same_bytes_with_and_without_the_pages(
    config: EngineConfig, loaded: LoadedEngine
) -> None:
    found = []
    for ui in (False, True):
        with recorded() as sent:
            async with service(config, loaded, ui=ui) as (served, child):
                if ui:
                    assert (await served.http.get("/ui/")).status_code == 200
                    assert (await served.http.get("/ui/api/hello", headers=UI)).status_code == 200
                await run(served)
                assert child.core is not None
                assert child.core.scheduler.pool.journal is None
        assert not [m for m in sent if isinstance(m, StepTrace | Blocks | Watch)]
        found.append(masked(sent))
    assert len(found[0]) > 40
    assert found[0] == found[1]


async def test_watched_engine_sends_the_same_tokens(
    config: EngineConfig, loaded: LoadedEngine
) -> None:
    found = []
    for is_watched in (False, True):
        with recorded() as sent:
            async with service(config, loaded, ui=True) as (served, _):
                if is_watched:
                    async with reading(served.http):
                        await run(served)
                else:
                    await run(served)
        assert any(isinstance(message, StepTrace) for message in sent) is is_watched
        outputs = [m.tokens for m in sent if type(m).__name__ == "StepOutputs" and m.tokens]
        found.append(masked([msgspec.json.decode(msgspec.json.encode(outputs))]))
    # A viewer's questions take ids from the same numbers, so the ids of requests differ.
    assert without_ids(found[0]) == without_ids(found[1])


def without_ids(found: list[bytes]) -> Any:
    steps = msgspec.msgpack.decode(found[0])
    return [[token[1:] for token in step] for step in steps]
