"""An OpenAI-compatible server whose bytes and delays a test controls."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

MODELS = [{"id": "one", "max_model_len": 1000}, {"id": "two"}]
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(word: str = "word ") -> bytes:
    return event({"choices": [{"delta": {"content": word}}]})


@dataclass
class Scripted:
    """A scripted server. Each response has the requested number of tokens.

    It waits `first_s` seconds before the first token and `gap_s` between tokens. It processes
    `at_a_time` requests concurrently; the others wait.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    at_a_time: int = 1000
    key: str = ""
    refuse: tuple[int, str] | None = None  # every response after the two of the calibration
    cut: bool = False  # after the calibration, streams break off after one token
    usage: bool = True
    cached: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(self.at_a_time)
        self.handlers: list[asyncio.Task[None]] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.append(asyncio.create_task(self._handle(reader, writer)))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if self.key and fields.get("authorization") != f"bearer {self.key}":
            await self._plain(writer, 401, {"error": {"message": "Give a valid API key."}})
        elif not body:
            await self._plain(writer, 200, {"data": MODELS})
        else:
            await self._answer(writer, json.loads(body))

    async def _plain(self, writer: asyncio.StreamWriter, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.asked.append(body)
        calibrating = len(self.asked) <= 2
        if self.refuse and not calibrating:
            status, message = self.refuse
            return await self._plain(writer, status, {"error": {"message": message}})
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await self._chunk(writer, event(ROLE))
        async with self._turn:
            await asyncio.sleep(self.first_s)
            for number in range(body["max_tokens"]):
                if number:
                    await asyncio.sleep(self.gap_s)
                await self._chunk(writer, text())
                if self.cut and not calibrating:
                    return None
        prompt = 10 + 2 * len(body["messages"][0]["content"].split())
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.usage:
            await self._chunk(writer, event({"choices": [], "usage": usage}))
        await self._chunk(writer, b"data: [DONE]\n\n")
        await self._chunk(writer, b"")
        return None

    async def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()


@contextlib.asynccontextmanager
async def scripted(**fields: Any) -> AsyncIterator[Scripted]:
    this = Scripted(**fields)
    server = await asyncio.start_server(this.accept, "127.0.0.1", 0)
    async with server:
        this.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            yield this
        finally:
            for handler in this.handlers:
                handler.cancel()
            await asyncio.gather(*this.handlers, return_exceptions=True)
