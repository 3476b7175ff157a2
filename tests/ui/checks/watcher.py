"""A view of the engine of the test's own: it reads /ui/api/watch in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.process import eventually
from tests.support.serve import Server
from tests.support.watched import Reader, Tables, reading


@dataclass(frozen=True)
class Step:
    """One step of the engine; times are microseconds of the server's clock."""

    number: int
    begin: int
    duration: int
    chunks: dict[int, tuple[int, int]]  # by request: first token and count
    decodes: frozenset[int]

    @property
    def end(self) -> int:
        return self.begin + self.duration

    def has(self, ids: set[int]) -> bool:
        return bool(ids & (self.decodes | self.chunks.keys()))


class Watcher:
    """The frames so far, and what follows from them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def tables_at(self, seq: int) -> Tables:
        """Return the block tables at the end of the frame with this number."""
        eventually(lambda: seq in self._reader.at, f"frame {seq} has come")
        return self._reader.at[seq]

    def ids_of(self, name: str) -> set[int]:
        """Return the engine's ids of the request with this x-request-id."""
        rows = [row for frame in list(self._reader.frames) for row in frame["requests"]]
        return {row[0] for row in rows if row[7] == name}

    def steps_of(self, ids: set[int]) -> list[Step]:
        """Return the steps that computed something of these requests."""
        return [step for step in self.steps() if step.has(ids)]

    def steps(self) -> Iterator[Step]:
        """All steps since the view was opened."""
        decoding: set[int] = set()
        for frame in list(self._reader.frames):
            for number, begin, duration, chunks, joined, left, *_ in frame["steps"]:
                decoding = (decoding - set(left)) | set(joined)
                sizes = {one: (start, count) for one, start, count in chunks}
                yield Step(number, begin, duration, sizes, frozenset(decoding))


@contextlib.contextmanager
def watching(server: Server) -> Iterator[Watcher]:
    """Watch a server until the context ends."""
    readers: list[Reader] = []
    begun = threading.Event()
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def read() -> None:
        ended = asyncio.Event()
        stops.append((asyncio.get_running_loop(), ended))
        async with server.http() as http, reading(http) as reader:
            readers.append(reader)
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(read()))
    thread.start()
    try:
        assert begun.wait(30)
        yield Watcher(readers[0])
    finally:
        loop, ended = stops[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()
