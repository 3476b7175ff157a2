"""The engine's ends of the sockets to the processes of grammars. None of them blocks."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import msgspec

from engine.grammar.messages import (
    CHUNK_BYTES,
    Ended,
    Frames,
    FromProcess,
    Kill,
    Slow,
    Start,
    ToForker,
    ToProcess,
    encode,
    framed,
)

MODULE = "engine.grammar.process"
PACKET_BYTES = 1 << 16


class Connection:
    """A socket to the process of one grammar."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self.close = weakref.finalize(self, end.close)
        self.awaited_since: float | None = None  # when the oldest call without an answer was sent
        self.num_awaited = 0
        self._unsent = bytearray()
        self._frames = Frames()
        self._decode = msgspec.msgpack.Decoder(FromProcess).decode

    def send(self, message: ToProcess, *, has_answer: bool = True) -> None:
        if has_answer:
            self.num_awaited += 1
            self.awaited_since = self.awaited_since or time.monotonic()
        self._unsent += framed(message)
        self.flush()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what the socket takes. A process that has ended is reported by the forker."""
        with contextlib.suppress(OSError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def receive(self) -> list[FromProcess]:
        with contextlib.suppress(OSError):
            while data := self.socket.recv(CHUNK_BYTES):
                self._frames.feed(data)
        messages = [self._decode(data) for data in self._frames]
        if messages:
            self.num_awaited -= len(messages)
            self.awaited_since = time.monotonic() if self.num_awaited else None
        return messages


class ForkerProcess:
    """The process that reads the tokenizer and forks the processes of grammars."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The folder of this package, which need not be installed, and no other.
        paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}
        with theirs:
            # One arena: others would take address space, which is limited.
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(tokenizer), str(vocab_size)],
                stdin=theirs.fileno(),
                env={**os.environ, **paths, "MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": ""},
            )
        self._decode = msgspec.msgpack.Decoder(Ended).decode
        # It also ends all processes of grammars. At the latest at the interpreter's exit.
        self.close = weakref.finalize(self, _close, self.control, self._process)

    @property
    def num_bytes(self) -> int:
        """The resident memory of the forker, which all processes share."""
        with contextlib.suppress(OSError):
            resident = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
            return int(resident) * resource.getpagesize()
        return 0

    @property
    def cpu_ticks(self) -> int:
        """The CPU time that the forker has used, in the kernel's ticks; 0 if it has ended."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._process.pid}/stat").read_text()
            fields = status.rpartition(")")[2].split()  # the name before it may have spaces
            return int(fields[11]) + int(fields[12])  # utime and stime in proc(5)
        return 0

    def start(self, process: int, end_token_ids: tuple[int, ...]) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(BrokenPipeError):
            start = encode(Start(process, end_token_ids))
            socket.send_fds(self.control, [start], [theirs.fileno()])
        return Connection(ours)

    def kill(self, process: int) -> None:
        self._send(Kill(process))

    def slow_down(self, process: int) -> None:
        self._send(Slow(process))

    def _send(self, message: ToForker) -> None:
        with contextlib.suppress(OSError):
            self.control.send(encode(message), socket.MSG_DONTWAIT)

    def ended(self) -> list[Ended] | None:
        """Return the processes that have ended since the last call; None if the forker has."""
        found = []
        try:
            while data := self.control.recv(PACKET_BYTES, socket.MSG_DONTWAIT):
                found.append(self._decode(data))
        except BlockingIOError:
            return found
        except ConnectionResetError:
            pass
        return None


def _close(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()
