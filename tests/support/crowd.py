"""Send thousands of small requests of every kind with little CPU time in the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST instead of FIN
INVALID: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "Hi", "temperature": 3}, 400),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 10**6}, 400),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": "Hi", "model": "another"}, 404),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "Hi"}]}, 400),
    ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}, 400),
    ("/v1/nothing", {}, 404),
]


@dataclass(frozen=True)
class Wish:
    """One request. If `leaves` is not None, its client disconnects after that many events."""

    path: str
    body: dict[str, Any]
    status: int = 200
    leaves: int | None = None

    @classmethod
    def draw(cls, rng: random.Random) -> Wish:
        """Draw a request: 5 % are invalid, 20 % disconnect, 10 % want several choices.

        Half of the requests are streams.
        """
        kind = rng.random()
        if kind < 0.05:
            return cls(*rng.choice(INVALID))
        text = f"{rng.randrange(10**6)} and {rng.randrange(10**6)}"
        body: dict[str, Any] = {"max_tokens": rng.randint(1, 4), "stream": rng.random() < 0.5}
        if rng.random() < 0.3:
            body |= {"seed": rng.randrange(100), "top_k": 20, "stop": ["no"], "logprobs": 1}
        path = "/v1/completions"
        if rng.random() < 0.5:
            path, logprobs = "/v1/chat/completions", body.pop("logprobs", None)
            body |= {"messages": [{"role": "user", "content": text}], "logprobs": bool(logprobs)}
        else:
            body["prompt"] = text
        if kind < 0.25:
            leaves = rng.randint(0, 3) if body["stream"] else 0
            return cls(path, body | {"max_tokens": 60, "ignore_eos": True}, leaves=leaves)
        return cls(path, body | {"n": rng.randint(2, 4)} if kind < 0.35 else body)

    def wire(self) -> bytes:
        body = json.dumps(self.body).encode()
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n".encode() + body


class Client:
    """A connection that is reused for the next request, and reopened after a disconnect."""

    def __init__(self, address: tuple[str, int], seen: Counter[str]) -> None:
        self._address, self.seen = address, seen
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, wish: Wish) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        self._writer.write(wish.wire())
        if wish.leaves is not None:
            await self._leave(wish.leaves)
            return
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert int(head.split()[1]) == wish.status, (head, wish)
        body = await self._body(head)
        if wish.body.get("stream") and wish.status == 200:
            assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), body
            self.seen["streamed"] += 1
        else:
            assert ("error" in json.loads(body)) == (wish.status != 200), body
            self.seen["whole" if wish.status == 200 else "refused"] += 1

    async def _body(self, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" in head:
            return await self._reader.readuntil(b"\r\n0\r\n\r\n")
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return await self._reader.readexactly(int(length))

    async def _leave(self, events: int) -> None:
        for _ in range(events):
            await self._reader.readuntil(b"data: ")
        self.seen["left"] += 1
        await self.close(self.seen["left"] % 2 == 0)

    async def close(self, resets: bool = False) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        if resets:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def send(address: tuple[str, int], wishes: list[Wish], clients: int) -> Counter[str]:
    """Send all requests, `clients` at a time, and count their outcomes.

    Fails on an unexpected response.
    """
    seen: Counter[str] = Counter()
    left = iter(wishes)

    async def work() -> None:
        client = Client(address, seen)
        try:
            for wish in left:
                await client.ask(wish)
        finally:
            await client.close()

    await asyncio.gather(*(work() for _ in range(clients)))
    return seen
