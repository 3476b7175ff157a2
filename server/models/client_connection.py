"""ClientConnection: a client's connection to the parent, which writes what a model has framed."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

from server.http.connection import Connection

WRITER = "writer"  # key of a request's state


class Gathered:
    """A transport that sends in one call what is written in one turn of the event loop.

    uvicorn writes head and body separately. Each call that sends wakes the process at the other
    end, which takes longer than all the rest of forwarding.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append(data)

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def write_through(self, data: bytes) -> None:
        """Send at once."""
        self.flush()
        self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()


class ChunkWriter:
    """Writes chunks to a client whose answer has begun, without h11 and uvicorn in between."""

    def __init__(self, transport: Gathered, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def is_full(self) -> bool:
        """Whether the client has not read what was written before."""
        return self._flow.write_paused

    def write(self, chunks: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write_through(chunks)

    async def drain(self) -> None:
        await self._flow.drain()


class ClientConnection(Connection):
    """One HTTP/1.1 connection of a client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        gathered = Gathered(transport)
        super().connection_made(gathered)  # type: ignore[arg-type]  # it has what is used
        self.app_state = {**self.app_state, WRITER: ChunkWriter(gathered, self.flow)}


def writer_of(scope: Scope) -> ChunkWriter | None:
    """Return what writes chunks to the client of a request; None if it takes no chunks."""
    if scope["http_version"] != "1.1" or scope["method"] == "HEAD":
        return None
    writer: ChunkWriter | None = scope["state"].get(WRITER)
    return writer
