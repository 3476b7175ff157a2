"""Messages over a pipe. Each one is preceded by its length."""

from __future__ import annotations

import struct
from typing import IO

import msgspec

from engine.parallel.messages import ToFollower

LENGTH = struct.Struct("<Q")  # bytes of the message that follows


class Sender:
    """The end of a pipe that sends. The pipe must not be buffered."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: ToFollower) -> None:
        """Raises BrokenPipeError if the receiver has ended."""
        self.send_encoded(self.encoded(message))

    def encoded(self, message: ToFollower) -> bytes:
        """Return the bytes of a message, which `send_encoded` sends."""
        body = self._encode(message)
        return LENGTH.pack(len(body)) + body

    def send_encoded(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            view = view[self._pipe.write(view) :]

    def close(self) -> None:
        self._pipe.close()


class Receiver:
    """The end of a pipe that receives."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._decode = msgspec.msgpack.Decoder(ToFollower).decode

    def receive(self) -> ToFollower:
        """Wait for a message. Raises EOFError if the sender has closed the pipe, or has ended."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._decode(self._read(length))

    def _read(self, size: int) -> bytes:
        data = self._pipe.read(size)
        if len(data) < size:
            raise EOFError
        return data
