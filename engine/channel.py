"""Typed zmq endpoints between the two processes; the only file that imports zmq.

Two PUSH/PULL pairs over `ipc://` in a private directory. The client binds, the engine connects.
Once it has, it removes the sockets' files: nothing reconnects, so a process that is killed leaves
nothing behind. The messages of each direction are numbered: were one lost, doubled or overtaken, an
answer would have a hole that nobody sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from engine.protocol import Fatal, FromEngine, ToEngine

Received = TypeVar("Received")
TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"  # the sockets' files
NUMBER = struct.Struct("<Q")  # ahead of each message: how many there were before it


class OutOfOrderError(Exception):
    """A message is not the next one that was sent."""


# What comes of a frame that is none of our messages, or not the next.
UNREADABLE = (
    OutOfOrderError,
    struct.error,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # Unbounded: admission bounds what is in flight, and a full queue would block the event loop.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    return socket


class _Outbox:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = _socket(context, zmq.PUSH)
        self._encode = msgspec.msgpack.Encoder().encode
        self._sent = 0

    def send(self, message: ToEngine | FromEngine, flags: int = 0) -> None:
        self.socket.send(NUMBER.pack(self._sent) + self._encode(message), flags)
        self._sent += 1


class _Inbox(Generic[Received]):
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: Any) -> None:
        self.socket = _socket(context, zmq.PULL)
        self._decode: Callable[[memoryview], Received] = msgspec.msgpack.Decoder(kind).decode
        self._due = 0

    def read(self, frame: bytes) -> Received:
        """The message in a frame that has come; raises one of UNREADABLE."""
        (number,) = NUMBER.unpack_from(frame)
        due, self._due = self._due, number + 1
        if number != due:
            raise OutOfOrderError(f"Message {number} has come, and {due} was due.")
        return self._decode(memoryview(frame)[NUMBER.size :])


def remove_sockets(address: str) -> None:
    """Their files and folder, which are needed for connecting alone. Idempotent."""
    folder = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        for name in (TO_ENGINE, FROM_ENGINE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


class EngineEndpoint:
    """The engine's end, connected: blocking or polling receive, immediate send."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._inbox: _Inbox[ToEngine] = _Inbox(self._context, ToEngine)
        self._outbox = _Outbox(self._context)
        ends = ((self._inbox.socket, TO_ENGINE), (self._outbox.socket, FROM_ENGINE))
        for socket, name in ends:
            # Not EVENT_CONNECTED: of a client that is stopped just then, zmq connects once more.
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(f"{address}/{name}")
            monitor.recv_multipart()
            socket.disable_monitor()
            monitor.close()

    def drain(self, *, block: bool) -> list[ToEngine]:
        """All messages that have come; with `block`, waits for the first."""
        messages: list[ToEngine] = []
        flags = 0 if block else zmq.NOBLOCK
        while True:
            try:
                messages.append(self._inbox.read(self._inbox.socket.recv(flags)))
            except zmq.Again:
                return messages
            flags = zmq.NOBLOCK

    def send(self, message: FromEngine) -> None:
        self._outbox.send(message)

    def close(self) -> None:
        self._context.destroy(linger=1000)


class ClientEndpoint:
    """The API process's end. What comes is kept from the first moment on, and read in the event
    loop once that has called `listen`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._inbox: _Inbox[FromEngine] = _Inbox(self._context, FromEngine)
        self._outbox = _Outbox(self._context)
        self._inbox.socket.bind(f"{address}/{FROM_ENGINE}")
        self._outbox.socket.bind(f"{address}/{TO_ENGINE}")
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, on_message: Callable[[FromEngine], None]) -> None:
        """From now on `on_message` is called in the running loop for each message."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.socket.fileno(), self._readable)
        # zmq's descriptor is edge-triggered: what came before add_reader would never wake it.
        self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        while not self._inbox.socket.closed:
            try:
                frame = self._inbox.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(self._message(frame))
            except Exception:
                # What it held is lost, and whoever waits for it would wait for ever.
                self._on_message(
                    Fatal("The server failed on a message of the engine.", traceback.format_exc())
                )

    def _message(self, frame: bytes) -> FromEngine:
        try:
            return self._inbox.read(frame)
        except UNREADABLE as error:
            # It may have held tokens: a dead engine is better than an answer with a gap.
            return Fatal("A message of the engine was lost or cannot be read.", repr(error))

    def receive(self, wait_s: float) -> bool:
        """Handle what has come, or comes within `wait_s` while the loop stands; was there any?"""
        arrived = bool(self._inbox.socket.poll(int(wait_s * 1000)))
        self._readable()
        return arrived

    def send(self, message: ToEngine) -> None:
        """Drops the message where no engine is connected: its end will be told otherwise."""
        with contextlib.suppress(zmq.Again):
            self._outbox.send(message, zmq.NOBLOCK)
        if self._loop is not None:  # a send may swallow the edge that announced an arrival
            self._loop.call_soon(self._readable)

    def close(self) -> None:
        if self._inbox.socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.socket.fileno())
        self._context.destroy(linger=0)
