"""A TCP proxy that slices the server's responses and resets connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.support.crowd import RESET


@dataclass
class Proxy:
    """Forward the response `slice_bytes` at a time; reset the client after `most` bytes of it."""

    target: tuple[str, int]
    slice_bytes: int = 65536
    most: int = 2**40
    port: int = 0

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection(*self.target)
        asking = asyncio.create_task(self._pass_on(client, writer))
        try:
            await self._slice(reader, answer)
        finally:
            asking.cancel()
            for end in (writer, answer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pass_on(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await client.read(65536):
            writer.write(data)
        if writer.can_write_eof():
            writer.write_eof()

    async def _slice(self, reader: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        connection = answer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        passed = 0
        while data := await reader.read(65536):
            for start in range(0, len(data), self.slice_bytes):
                if passed >= self.most:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return
                piece = data[start : start + self.slice_bytes]
                passed += len(piece)
                answer.write(piece)
                await asyncio.sleep(0)  # let the client, in the same loop, read this piece alone


@contextlib.asynccontextmanager
async def proxied(target: tuple[str, int], **how: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(target, **how)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    async with server:
        proxy.port = server.sockets[0].getsockname()[1]
        yield proxy
