"""A proxy before a server: it records the requests and answers, and can change a request."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PIECE = 65536
TIMEOUT_S = 180


@dataclass
class Exchange:
    """A request with a body, and its answer so far."""

    body: dict[str, Any]
    status: int = 0
    answer: str = ""
    is_complete: bool = False

    @property
    def events(self) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        lines = [line for line in self.answer.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        choices = [choice for event in self.events for choice in event["choices"]]
        return [choice["delta"] for choice in choices]

    @property
    def text(self) -> str:
        """The content of the answer, streamed or not."""
        if self.body.get("stream"):
            return "".join(delta.get("content") or "" for delta in self.deltas)
        content = json.loads(self.answer)["choices"][0]["message"]["content"]
        return str(content or "")


class Recorder:
    """The proxy of the server at `url`, on a free port of the loopback address.

    `change` may change the body of a request before it is sent on.
    """

    def __init__(self, url: str) -> None:
        self.exchanges: list[Exchange] = []
        self.change: Callable[[dict[str, Any]], None] = lambda body: None
        self._address = urlsplit(url).netloc
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                recorder._pass_on(self)

            def do_POST(self) -> None:
                recorder._pass_on(self)

            def log_message(self, format: str, *values: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        exchange = Exchange(body={})
        sent: bytes | None = None
        if handler.command == "POST":
            exchange.body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
            self.change(exchange.body)
            self.exchanges.append(exchange)
            sent = json.dumps(exchange.body).encode()
        headers = {
            "authorization": handler.headers.get("authorization", ""),
            "content-type": "application/json",
        }
        onward = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        # If the client leaves, a write raises, and the server must see that, too.
        with contextlib.closing(onward):
            onward.request(handler.command, handler.path, sent, headers)
            self._pass_back(onward.getresponse(), handler, exchange)

    def _pass_back(
        self,
        response: http.client.HTTPResponse,
        handler: BaseHTTPRequestHandler,
        exchange: Exchange,
    ) -> None:
        exchange.status = response.status
        # The answer ends with the connection, so that no length is needed.
        handler.send_response(response.status)
        handler.send_header("content-type", response.headers["content-type"])
        handler.end_headers()
        while piece := response.read1(PIECE):
            exchange.answer += piece.decode()
            handler.wfile.write(piece)
            handler.wfile.flush()
        exchange.is_complete = True
