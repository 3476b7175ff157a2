"""The sockets between the two processes: everything arrives, once, in order, and wakes the loop."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from engine.channel import (
    FROM_ENGINE,
    NUMBER,
    TO_ENGINE,
    ClientEndpoint,
    EngineEndpoint,
    OutOfOrderError,
    remove_sockets,
)
from engine.protocol import (
    Abort,
    EngineStats,
    Fatal,
    FromEngine,
    GenerateRequest,
    Progress,
    SamplingParams,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenOutput,
)

COUNT = 3000
GREETINGS = 50  # what an engine says before anybody has said anything to it


@pytest.fixture
def address() -> Iterator[str]:
    # Not tmp_path: the path of a socket has at most about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    yield f"ipc://{folder}"
    shutil.rmtree(folder, ignore_errors=True)


class Engine:
    """The engine's end in a thread; greets, then `act` answers each batch until a Shutdown."""

    def __init__(self, address: str, act: Callable[[EngineEndpoint, list[ToEngine]], None]) -> None:
        self.address, self.act = address, act
        self.received: list[ToEngine] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        endpoint = EngineEndpoint(self.address)
        for number in range(GREETINGS):
            endpoint.send(Progress("loading", number / GREETINGS))
        while not any(isinstance(message, Shutdown) for message in self.received):
            messages = endpoint.drain(block=True)
            self.received += messages
            self.act(endpoint, messages)
        endpoint.close()


class Client:
    """The API process's end, collecting what comes."""

    def __init__(self, address: str, *, listening: bool = True) -> None:
        self.received: list[FromEngine] = []
        self._news = asyncio.Event()
        self.endpoint = ClientEndpoint(address)
        if listening:
            self.listen()

    def listen(self) -> None:
        self.endpoint.listen(self._take)

    def _take(self, message: FromEngine) -> None:
        self.received.append(message)
        self._news.set()

    async def until(self, count: int) -> None:
        """Waits without sending anything: a lost wake-up is a timeout here."""
        async with asyncio.timeout(60):
            while len(self.received) < count:
                self._news.clear()
                await self._news.wait()

    async def greeted(self) -> None:
        """Before that, nothing may be sent; after it, the greetings are forgotten."""
        await self.until(GREETINGS)
        self.connected()
        assert self.received == [Progress("loading", n / GREETINGS) for n in range(GREETINGS)]
        self.received.clear()

    def connected(self) -> None:
        assert self.endpoint._outbox.socket.poll(30_000, zmq.POLLOUT), "no engine connects"

    async def end(self, engine: Engine) -> None:
        self.endpoint.send(Shutdown())
        await asyncio.to_thread(engine.thread.join, 60)
        assert not engine.thread.is_alive()
        self.endpoint.close()


def request(number: int) -> GenerateRequest:
    return GenerateRequest(number, list(range(number % 300)), SamplingParams(8), 1.5, 0, "ü")


def outputs(number: int) -> StepOutputs:
    return StepOutputs(0.5, [TokenOutput(number, 7, "stop")], [], EngineStats(step=number))


async def test_bursts_in_both_directions_arrive_in_order(address: str) -> None:
    def echo(endpoint: EngineEndpoint, messages: list[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, GenerateRequest):
                endpoint.send(outputs(message.id))

    client = Client(address)
    engine = Engine(address, echo)
    await client.greeted()
    for number in range(COUNT):
        client.endpoint.send(request(number))
        if number % 100 == 99:
            await asyncio.sleep(0)
    await client.until(COUNT)
    await client.end(engine)
    assert engine.received == [*map(request, range(COUNT)), Shutdown()]
    assert client.received == [*map(outputs, range(COUNT))]


async def test_no_wake_up_is_lost(address: str) -> None:
    """zmq's descriptor is edge-triggered and a send can swallow an edge: one message at a time,
    each answered only when the last answer has been seen, stalls at the first lost one."""

    def answer(endpoint: EngineEndpoint, messages: list[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, Abort):
                for part in range(message.ids[1]):
                    endpoint.send(Progress("part", float(part)))

    client = Client(address)
    engine = Engine(address, answer)
    await client.greeted()
    due = 0
    for number in range(COUNT // 3):
        parts = 1 + number % 3
        client.endpoint.send(Abort([number, parts]))
        due += parts
        await client.until(due)
    await client.end(engine)
    assert len(client.received) == due


async def test_once_connected_nothing_needs_the_files(address: str) -> None:
    """So they go early: a server killed while the engine loads leaves nothing behind."""

    def echo(endpoint: EngineEndpoint, messages: list[ToEngine]) -> None:
        endpoint.send(outputs(len(messages)))

    client = Client(address)
    engine = Engine(address, echo)
    await client.until(1)
    remove_sockets(address)
    with pytest.raises(FileNotFoundError):
        os.listdir(address.removeprefix("ipc://"))
    remove_sockets(address)
    await client.greeted()
    client.endpoint.send(Abort([1]))
    await client.until(1)
    await client.end(engine)
    assert engine.received == [Abort([1]), Shutdown()]


def test_the_engine_is_connected_once_the_client_has_answered(address: str) -> None:
    """Before, it may have to come again: zmq gives up a client that was stopped for 30 s."""
    silent = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for listener, name in zip(silent, (TO_ENGINE, FROM_ENGINE), strict=True):
        listener.bind(f"{address.removeprefix('ipc://')}/{name}")
        listener.listen()
    with ThreadPoolExecutor() as pool:
        connecting = pool.submit(EngineEndpoint, address)
        time.sleep(0.3)
        early = connecting.done()
        for listener in silent:
            listener.close()
        shutil.rmtree(address.removeprefix("ipc://"))
        os.mkdir(address.removeprefix("ipc://"))
        client = ClientEndpoint(address)
        connecting.result(timeout=30).close()
    client.close()
    assert not early


@pytest.mark.parametrize("listening", [True, False])
async def test_what_came_before_the_loop_looked_is_seen(listening: bool, address: str) -> None:
    client = Client(address, listening=listening)
    engine = Engine(address, lambda endpoint, messages: None)
    time.sleep(0.5)  # noqa: ASYNC251 - the loop must stand while the greetings arrive
    if not listening:
        client.listen()
    await client.greeted()
    await client.end(engine)


async def test_a_handler_may_send_and_close(address: str) -> None:
    """Closing within the handler must stop the reading at once."""

    def flood(endpoint: EngineEndpoint, messages: list[ToEngine]) -> None:
        for number in range(50):
            endpoint.send(outputs(number))

    seen: list[FromEngine] = []
    done = asyncio.Event()

    def take(message: FromEngine) -> None:
        seen.append(message)
        if len(seen) == GREETINGS:
            assert endpoint._outbox.socket.poll(30_000, zmq.POLLOUT), "no engine connects"
            endpoint.send(Abort([1]))
        if len(seen) == GREETINGS + 3:
            endpoint.send(Shutdown())
        if len(seen) == GREETINGS + 20:
            endpoint.close()
            endpoint.close()
            done.set()

    endpoint = ClientEndpoint(address)
    endpoint.listen(take)
    engine = Engine(address, flood)
    async with asyncio.timeout(60):
        await done.wait()
    await asyncio.to_thread(engine.thread.join, 60)
    assert len(seen) == GREETINGS + 20


async def test_an_unreadable_frame_is_fatal_and_does_not_stop_the_reading(address: str) -> None:
    """Reliability T-39: an answer never just lacks tokens."""
    client = Client(address)
    engine = EngineEndpoint(address)
    good = engine._outbox._encode(outputs(1))
    for frame in (b"", b"\xff", b"\x91" * 100_000, good[:-1], good.replace(b"stop", b"\xff" * 4)):
        engine._outbox.socket.send(NUMBER.pack(engine._outbox._sent) + frame)
        engine._outbox._sent += 1
        engine.send(outputs(1))
    engine._outbox.socket.send(b"short")
    engine.send(outputs(1))
    await client.until(12)
    assert [isinstance(message, Fatal) for message in client.received] == [True, False] * 6
    engine.close()
    client.endpoint.close()


@pytest.mark.parametrize("order", [[0, 2], [0, 1, 1], [1, 0], [2**64 - 1]])
async def test_a_message_lost_doubled_or_overtaken_is_noticed(
    order: list[int], address: str
) -> None:
    """Reliability T-39: by whoever receives it, and before it is used."""
    client = Client(address)
    engine = EngineEndpoint(address)
    client.connected()
    for number in order:
        for outbox, message in (
            (engine._outbox, outputs(number)),
            (client.endpoint._outbox, Abort([number])),
        ):
            outbox.socket.send(NUMBER.pack(number) + outbox._encode(message))

    def drain() -> None:
        for _ in order:
            engine.drain(block=True)

    with pytest.raises(OutOfOrderError):
        drain()
    await client.until(len(order))
    wrong = next(n for n, number in enumerate(order) if number != n)
    assert client.received[:wrong] == [outputs(n) for n in range(wrong)]
    assert isinstance(client.received[wrong], Fatal)
    engine.close()
    client.endpoint.close()


async def test_a_message_that_cannot_be_handled_is_fatal_and_does_not_stop_the_reading(
    address: str,
) -> None:
    """What it held is lost: whoever waits for it would wait for ever."""
    seen: list[FromEngine] = []
    done = asyncio.Event()

    def take(message: FromEngine) -> None:
        if isinstance(message, Progress):
            raise KeyError(message.stage)
        seen.append(message)
        if len(seen) == 3:
            done.set()

    endpoint, engine = ClientEndpoint(address), EngineEndpoint(address)
    endpoint.listen(take)
    for message in (outputs(1), Progress("broken", 0.5), outputs(2)):
        engine.send(message)
    async with asyncio.timeout(60):
        await done.wait()
    assert (seen[0], seen[2]) == (outputs(1), outputs(2))
    assert isinstance(seen[1], Fatal)
    assert "KeyError: 'broken'" in seen[1].detail
    engine.close()
    endpoint.close()


async def test_polling(address: str) -> None:
    client = Client(address)
    client.endpoint.send(Abort([0]))  # to nobody: dropped
    engine = EngineEndpoint(address)
    assert engine.drain(block=False) == []
    client.connected()
    client.endpoint.send(Abort([1]))
    assert engine._inbox.socket.poll(30_000)
    assert engine.drain(block=False) == [Abort([1])]
    engine.send(Fatal("the end"))
    assert client.endpoint.receive(wait_s=30)
    assert client.received == [Fatal("the end")]
    assert not client.endpoint.receive(wait_s=0.01)
    engine.close()
    client.endpoint.close()


async def test_an_idle_engine_sleeps_until_something_comes(address: str) -> None:
    """It would keep a core busy for nothing."""
    client = Client(address)
    engine = EngineEndpoint(address)
    client.connected()
    began = threading.Event()

    def drain() -> list[ToEngine]:
        began.set()
        return engine.drain(block=True)

    drained = asyncio.ensure_future(asyncio.to_thread(drain))
    await asyncio.to_thread(began.wait, 30)
    await asyncio.sleep(0.1)
    assert not drained.done()
    client.endpoint.send(Abort([1]))
    assert await asyncio.wait_for(drained, 30) == [Abort([1])]
    engine.close()
    client.endpoint.close()
