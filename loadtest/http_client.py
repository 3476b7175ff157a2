"""A streaming completion over a bare socket, so that the load generator costs next to nothing."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Completion:
    """What one streamed request took; times in seconds of CLOCK_MONOTONIC."""

    started: float
    arrivals: tuple[float, ...]  # of each event that carried tokens
    tokens: int  # from the usage event

    @property
    def gaps(self) -> list[float]:
        """Between events; a server that sends several tokens at once has fewer, longer ones."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream_completion(host: str, port: int, body: dict[str, Any]) -> Completion:
    """POST /v1/completions, streamed; RuntimeError with the server's words if it is no 200."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Length: {len(payload)}\r\nContent-Type: application/json\r\n"
        "Connection: close\r\n\r\n"
    )
    started = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode(errors="replace"))
        arrivals: list[float] = []
        tokens = 0
        async for line in reader:
            if line.startswith(b'data: {"') and b'"choices":[]' not in line:
                if b'"finish_reason":null' in line:
                    arrivals.append(time.monotonic())
            elif line.startswith(b"data: {"):
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        return Completion(started, tuple(arrivals), tokens)
    finally:
        writer.close()


async def closed_loop(
    host: str, port: int, bodies: list[dict[str, Any]], concurrency: int
) -> tuple[float, list[Completion]]:
    """Send all bodies, `concurrency` at a time; wall seconds and completions."""
    queue = iter(bodies)
    done: list[Completion] = []

    async def worker() -> None:
        for body in queue:
            done.append(await stream_completion(host, port, body))

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return time.monotonic() - began, done


async def post_all(
    host: str, port: int, path: str, bodies: list[dict[str, Any]], concurrency: int
) -> list[bytes]:
    """The answers to all bodies, `concurrency` at a time, over as many connections."""
    queue = iter(enumerate(bodies))
    answers = [b""] * len(bodies)

    async def worker() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for index, body in queue:
                payload = json.dumps(body).encode()
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
                    f"Content-Length: {len(payload)}\r\nContent-Type: application/json\r\n\r\n"
                )
                writer.write(head.encode() + payload)
                status, *fields = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                length = next(f for f in fields if f.lower().startswith(b"content-length:"))
                answers[index] = await reader.readexactly(int(length.partition(b":")[2]))
                if b" 200 " not in status:
                    raise RuntimeError(answers[index].decode(errors="replace"))
        finally:
            writer.close()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return answers
