"""Run what is not trusted in a child process with limits on memory and time.

A chat template, or a regular expression of a tokenizer, comes with a checkpoint and may compute
anything. An image comes with a request, and C libraries decode it. The child limits its own
memory and sets an alarm before each call. Linux kills it when the alarm rings, even inside a
computation that holds the GIL. It ends at the end of its stdin, and thus with its parent.

A call is one message to the child and one back: 4 bytes for the length (little-endian), and data.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

HEADER = struct.Struct("<I")
# The child's alarm ends a call. The parent waits this much longer, for the child's start and for a
# busy machine, and then kills a child that was suspended.
GRACE_S = 20.0
ENDING_S = 1.0  # between the end of a child's output and its own end
MEMORY_STATUS = 77  # exit status of a child after a MemoryError


class Limits(NamedTuple):
    """Limits of one call. `seconds` are those of every call after the first."""

    memory: int  # size of the child's address space in bytes; the interpreter itself takes 60 MiB
    seconds: float
    memory_per_byte: int = 0  # additional memory for each byte of the message
    first_seconds: float = 5  # limit of the first call, which may compile something


class ConfinedError(Exception):
    """The child ended during a call: it was over a limit, or it crashed."""


# ---- the child -----------------------------------------------------------------------------------


def serve(handle: Callable[[bytes], bytes]) -> None:
    """Answer every message on stdin with `handle`'s on stdout, until stdin ends.

    The command line's last arguments are the limits. A MemoryError ends the process, because the
    memory of an interrupted call may stay in use.
    """
    memory, seconds, memory_per_byte, first_seconds = map(float, sys.argv[-4:])
    timeout = first_seconds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the server's terminal
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine's memory runs out, end this process and no other
    _, most_ever = resource.getrlimit(resource.RLIMIT_AS)  # of `ulimit -v`
    most = sys.maxsize if most_ever == resource.RLIM_INFINITY else most_ever
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while (message := _receive(stdin)) is not None:
        size = int(memory + memory_per_byte * len(message))
        resource.setrlimit(resource.RLIMIT_AS, (min(size, most), most_ever))
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            answer = handle(message)
        except MemoryError:
            os._exit(MEMORY_STATUS)
        signal.setitimer(signal.ITIMER_REAL, 0)
        stdout.write(HEADER.pack(len(answer)) + answer)
        stdout.flush()
        timeout = seconds


def _receive(stream: BinaryIO) -> bytes | None:
    """Return the next message, which may be empty; None at the end of the stream."""
    header = stream.read(HEADER.size)
    return stream.read(*HEADER.unpack(header)) if len(header) == HEADER.size else None


# ---- the parent ----------------------------------------------------------------------------------


class ConfinedProcess:
    """A child that runs `command`, which calls `serve`. One thread at a time may call it."""

    def __init__(self, command: list[str], limits: Limits) -> None:
        self._limits = limits
        self._timeout = limits.first_seconds  # of the next answer
        # Messages of a library that fails, such as a panic's backtrace, are of no use to users.
        self._process = subprocess.Popen(
            [*command, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def call(self, message: bytes) -> bytes:
        """Send a message and return the answer. Raises ConfinedError if the child ends instead."""
        self.send(message)
        return self.receive()

    def send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `receive` reports
            _write_all(self._process.stdin.fileno(), HEADER.pack(len(message)) + message)

    def receive(self) -> bytes:
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        deadline = time.monotonic() + self._timeout + GRACE_S
        header = _read(out, HEADER.size, deadline)
        answer = b""
        if len(header) == HEADER.size:
            (size,) = HEADER.unpack(header)
            answer = _read(out, size, deadline)
        if not answer:
            raise ConfinedError(self._why_it_ended())
        self._timeout = self._limits.seconds
        return answer

    def _why_it_ended(self) -> str:
        try:
            status = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:  # it was suspended beyond the deadline
            self._process.kill()
            status = -signal.SIGALRM
        if status == -signal.SIGALRM:
            return f"took more than {self._timeout:g} s"
        if status in (MEMORY_STATUS, -signal.SIGABRT):  # Rust aborts if it gets no memory
            return f"took more than {self._limits.memory >> 20} MiB of memory"
        return f"ended its process with status {status}"

    def close(self) -> None:
        """Kill the child. Idempotent."""
        self._process.kill()
        with self._process:  # closes the pipes, and waits
            pass


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read(file: int, size: int, deadline: float) -> bytes:
    """Read `size` bytes; fewer at the end of the file or at the deadline."""
    parts = bytearray()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while len(parts) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            break
        part = os.read(file, size - len(parts))
        if not part:
            break
        parts += part
    return bytes(parts)
