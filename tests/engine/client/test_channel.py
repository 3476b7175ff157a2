"""The sockets between the processes: messages arrive once and in order, and wake the loop."""

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

import msgspec
import pytest
import zmq

from engine.client.channel import (
    FROM_ENGINE,
    NUMBER,
    TO_ENGINE,
    ClientEndpoint,
    EngineEndpoint,
    OutOfOrderError,
    remove_sockets,
)
from engine.protocol.failure import Fatal
from engine.protocol.generate import Abort, GenerateRequest, Image, SamplingParams
from engine.protocol.outputs import EngineStats, StepOutputs, TokenOutput
from engine.protocol.ready import Progress, Shutdown
from engine.protocol.wire import FromEngine, ToEngine

COUNT = 3000
GREETINGS = 50  # messages that the engine sends before it has received any


@pytest.fixture
def address() -> Iterator[str]:
    # Not tmp_path, because a socket's path has at most about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    yield f"ipc://{folder}"
    shutil.rmtree(folder, ignore_errors=True)


class Engine:
    """The engine's end in a thread. It sends greetings; `act` then answers each batch of messages
    until Shutdown."""

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
    """The API process's end, which collects the received messages."""

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
        """Wait without sending anything, so that a lost wake-up causes a timeout."""
        async with asyncio.timeout(60):
            while len(self.received) < count:
                self._news.clear()
                await self._news.wait()

    async def greeted(self) -> None:
        """Wait for the greetings and discard them. Do not send anything before."""
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


async def test_channel_bursts_in_both_directions_arrive_in_order(address: str) -> None:
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


async def test_channel_sends_pixels_behind_the_message_without_encoding_them(
    address: str,
) -> None:
    """Texts and pictures arrive in order, each picture with its own pixels, also empty ones."""

    def showing(number: int) -> GenerateRequest:
        sizes = (number * 100_000, 0, 1)[: number % 4]
        images = [
            Image(b"%d" % index, ((index, 1),), bytes([number]) * size)
            for index, size in enumerate(sizes)
        ]
        return msgspec.structs.replace(request(number), images=tuple(images))

    def echo(endpoint: EngineEndpoint, messages: list[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, GenerateRequest):
                endpoint.send(outputs(message.id))

    client = Client(address)
    engine = Engine(address, echo)
    await client.greeted()
    encode, lengths = client.endpoint._outbox._encode, []

    def measured(message: object) -> bytes:
        lengths.append(len(encode(message)))
        return encode(message)

    client.endpoint._outbox._encode = measured
    for number in range(16):
        client.endpoint.send(showing(number))
    await client.until(16)
    await client.end(engine)
    assert engine.received == [*map(showing, range(16)), Shutdown()]
    assert max(lengths) < 1000


async def test_channel_single_messages_lose_no_wake_up(address: str) -> None:
    """zmq's descriptor is edge-triggered, and a send can consume an edge. The test sends one
    message at a time, after the last answer has arrived, so it stalls at a lost wake-up."""

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


async def test_channel_connected_works_without_socket_files(address: str) -> None:
    """The files are removed early, so a server killed during loading leaves none behind."""

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


def test_engine_endpoint_silent_client_waits_for_its_handshake(address: str) -> None:
    """A connection without handshake may be lost: zmq drops a client stopped for 30 s."""
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
async def test_client_endpoint_blocked_loop_loses_no_message(listening: bool, address: str) -> None:
    client = Client(address, listening=listening)
    engine = Engine(address, lambda endpoint, messages: None)
    time.sleep(0.5)  # noqa: ASYNC251 - the greetings must arrive while the loop is blocked
    if not listening:
        client.listen()
    await client.greeted()
    await client.end(engine)


async def test_client_endpoint_handler_may_send_and_close(address: str) -> None:
    """Closing in the handler must stop the delivery of messages at once."""

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


async def test_client_endpoint_unreadable_frame_is_fatal_and_reading_goes_on(address: str) -> None:
    """A lost message must end the engine: an answer must never have a gap."""
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
async def test_channel_lost_repeated_or_reordered_message_is_detected(
    order: list[int], address: str
) -> None:
    """The receiver of each direction detects the error before it uses the message."""
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


async def test_client_endpoint_failing_handler_is_fatal_and_reading_goes_on(
    address: str,
) -> None:
    """The contents of the message are lost, so requests that need them would wait forever."""
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


async def test_channel_polling_returns_only_messages_that_arrived(address: str) -> None:
    client = Client(address)
    client.endpoint.send(Abort([0]))  # dropped, because no engine is connected
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


async def test_engine_endpoint_idle_sleeps_until_a_message_arrives(address: str) -> None:
    """A busy loop would waste a core."""
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
