"""Messages between the engine and the processes of grammars: msgpack behind a length of 4 bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from engine.protocol.message import Message

HEADER = struct.Struct("<I")
CHUNK_BYTES = 1 << 18


class Compile(Message, frozen=True):
    """Compile a grammar in llguidance's JSON format. The answer is `Compiled`."""

    source: str


class Open(Message, frozen=True):
    """Begin an answer that follows the grammar. The answer is `Allowed`."""

    answer: int
    serial: int


class Advance(Message, frozen=True):
    """Forget the last `rollback` tokens of an answer, and take `tokens`. The answer is `Allowed`.

    With `each` it has a mask before each of the tokens, too.
    """

    answer: int
    serial: int
    rollback: int
    tokens: list[int]
    each: bool = False


class Try(Message, frozen=True):
    """Follow a draft and go back. `Allowed` has a mask behind each token that is allowed."""

    answer: int
    serial: int
    tokens: list[int]


class Close(Message, frozen=True):
    """Forget an answer."""

    answer: int


class Compiled(Message, frozen=True):
    problem: str  # why the grammar cannot be followed, or ""
    num_bytes: int  # memory that the process holds for its grammar


class Allowed(Message, frozen=True):
    """The masks of allowed tokens, ceil(V / 32) words of int32 each."""

    answer: int
    serial: int
    masks: list[bytes]
    forced: list[int]  # the next tokens, if the grammar leaves no choice
    problem: str  # why the grammar cannot go on, or ""
    num_bytes: int
    seconds: float  # CPU time
    # The last mask also holds behind `steady` further tokens, if none is among `changing`.
    steady: int = 0
    changing: tuple[int, ...] = ()


class Start(Message, frozen=True):
    """Start a process for a grammar; it talks through the socket that comes with the message."""

    process: int
    end_token_ids: tuple[int, ...]


class Kill(Message, frozen=True):
    process: int


class Slow(Message, frozen=True):
    """Let a process run only when no other thread of the machine wants to."""

    process: int


class Ended(Message, frozen=True):
    process: int
    status: int  # of exit, or the negative number of a signal


ToProcess = Compile | Open | Advance | Try | Close
FromProcess = Compiled | Allowed
ToForker = Start | Kill | Slow

encode = msgspec.msgpack.Encoder().encode


def framed(message: Message) -> bytes:
    data = encode(message)
    return HEADER.pack(len(data)) + data


class Frames:
    """Splits the bytes of a socket into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def __iter__(self) -> Iterator[bytes]:
        while len(self._data) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._data)
            end = HEADER.size + size
            if len(self._data) < end:
                return
            yield bytes(self._data[HEADER.size : end])
            del self._data[:end]


def received(connection: socket.socket) -> Iterator[bytes]:
    """Yield messages until the other end closes the socket."""
    frames = Frames()
    while data := connection.recv(CHUNK_BYTES):
        frames.feed(data)
        yield from frames
