"""Typed zmq endpoints between the two processes; the only file that imports zmq.

There are two PUSH/PULL pairs over `ipc://` in a private directory. The client binds and the engine
connects. Once connected, the engine removes the socket files. Neither side ever reconnects, and a
killed process then leaves no files behind.

The messages of each direction are numbered. Without the numbers, a message that is lost, repeated
or reordered could leave an undetected gap in an answer.

The pixels of a request are frames of their own behind the message. They are not copied: encoding
the megabytes of many images would block the event loop for 0.1 s.
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

from engine.protocol.failure import Fatal
from engine.protocol.generate import GenerateRequest
from engine.protocol.message import Message
from engine.protocol.wire import FromEngine, ToEngine

Received = TypeVar("Received")
TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"  # names of the socket files
NUMBER = struct.Struct("<Q")  # precedes each message: the number of messages sent before it


class OutOfOrderError(Exception):
    """A received message does not have the expected number."""


# Exceptions that `_Inbox.read` raises for an invalid frame.
UNREADABLE = (
    OutOfOrderError,
    struct.error,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # Unbounded, because a full queue would block the event loop. Admission control bounds the work.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    return socket


class _Outbox:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = _socket(context, zmq.PUSH)
        self._encode = msgspec.msgpack.Encoder().encode
        self._sent = 0

    def send(self, message: Message, flags: int = 0) -> None:
        if isinstance(message, GenerateRequest) and message.images:
            frame = NUMBER.pack(self._sent) + self._encode(message.without_pixels)
            pixels = [image.pixels for image in message.images]
            self.socket.send_multipart([frame, *pixels], flags, copy=False)
        else:
            self.socket.send(NUMBER.pack(self._sent) + self._encode(message), flags)
        self._sent += 1


class _Inbox(Generic[Received]):
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: Any) -> None:
        self.socket = _socket(context, zmq.PULL)
        self._decode: Callable[[memoryview], Received] = msgspec.msgpack.Decoder(kind).decode
        self._due = 0

    def read(self, frame: bytes) -> Received:
        """Decode a received frame. Raises one of UNREADABLE if it is invalid or out of order."""
        (number,) = NUMBER.unpack_from(frame)
        due, self._due = self._due, number + 1
        if number != due:
            raise OutOfOrderError(f"Received message {number}, expected message {due}.")
        return self._decode(memoryview(frame)[NUMBER.size :])


def remove_sockets(address: str) -> None:
    """Remove the socket files and their folder, which only connecting needs. Idempotent."""
    folder = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        for name in (TO_ENGINE, FROM_ENGINE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


class EngineEndpoint:
    """The engine's end of the channel. The constructor returns once both sockets are connected."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._inbox: _Inbox[ToEngine] = _Inbox(self._context, ToEngine)
        self._outbox = _Outbox(self._context)
        ends = ((self._inbox.socket, TO_ENGINE), (self._outbox.socket, FROM_ENGINE))
        for socket, name in ends:
            # Not EVENT_CONNECTED: if the client is stopped at that moment, zmq connects again.
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(f"{address}/{name}")
            monitor.recv_multipart()
            socket.disable_monitor()
            monitor.close()

    def drain(self, *, block: bool) -> list[ToEngine]:
        """Return all messages that have arrived. With `block`, wait for the first one."""
        messages: list[ToEngine] = []
        flags = 0 if block else zmq.NOBLOCK
        while True:
            try:
                frame, *pixels = self._inbox.socket.recv_multipart(flags)
            except zmq.Again:
                return messages
            message = self._inbox.read(frame)
            if pixels and isinstance(message, GenerateRequest):
                message = message.with_pixels(pixels)
            messages.append(message)
            flags = zmq.NOBLOCK

    def send(self, message: Message) -> None:
        self._outbox.send(message)

    def close(self) -> None:
        self._context.destroy(linger=1000)


class ClientEndpoint:
    """The API process's end of the channel.

    Messages are queued as soon as it exists. The event loop reads them once it has called `listen`.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._inbox: _Inbox[FromEngine] = _Inbox(self._context, FromEngine)
        self._outbox = _Outbox(self._context)
        self._inbox.socket.bind(f"{address}/{FROM_ENGINE}")
        self._outbox.socket.bind(f"{address}/{TO_ENGINE}")
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, on_message: Callable[[FromEngine], None]) -> None:
        """Call `on_message` in the running event loop for each message from now on."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.socket.fileno(), self._readable)
        # zmq's descriptor is edge-triggered: earlier messages would never wake the loop.
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
                # Its contents are lost, and requests that need them would wait forever.
                self._on_message(
                    Fatal("The server failed to handle an engine message.", traceback.format_exc())
                )

    def _message(self, frame: bytes) -> FromEngine:
        try:
            return self._inbox.read(frame)
        except UNREADABLE as error:
            # It may have held tokens: a dead engine is better than an answer with a gap.
            return Fatal("An engine message was lost or cannot be decoded.", repr(error))

    def receive(self, wait_s: float) -> bool:
        """Handle all queued messages, blocking up to `wait_s` seconds for the first.

        Returns whether there was one.
        """
        arrived = bool(self._inbox.socket.poll(int(wait_s * 1000)))
        self._readable()
        return arrived

    def send(self, message: ToEngine) -> None:
        """Send a message, or drop it if no engine is connected.

        The client learns of the engine's end from the process, not from the socket.
        """
        with contextlib.suppress(zmq.Again):
            self._outbox.send(message, zmq.NOBLOCK)
        if self._loop is not None:  # a send can consume the edge that signals an arrival
            self._loop.call_soon(self._readable)

    def close(self) -> None:
        if self._inbox.socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.socket.fileno())
        self._context.destroy(linger=0)
