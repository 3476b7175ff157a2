"""A TCP proxy in a thread that keeps every byte that a browser receives."""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
from collections.abc import Iterator

ENCODINGS = re.compile(rb"(?i)\r\naccept-encoding: [^\r]*")


class RecordingProxy(socketserver.ThreadingTCPServer):
    """Forwards connections to `target`; `received` has all bytes of all responses.

    It asks for responses without compression, so that they can be searched.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target = target
        self.received = bytearray()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.BaseRequestHandler):
    server: RecordingProxy
    request: socket.socket

    def handle(self) -> None:
        with socket.create_connection(self.server.target) as upstream:
            asking = threading.Thread(target=self._ask, args=(upstream,), daemon=True)
            asking.start()
            with contextlib.suppress(OSError):
                while data := upstream.recv(65536):
                    self.server.received += data
                    self.request.sendall(data)
            with contextlib.suppress(OSError):
                self.request.shutdown(socket.SHUT_RDWR)

    def _ask(self, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(65536):
                upstream.sendall(ENCODINGS.sub(b"", data))
            upstream.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def recording(target: tuple[str, int]) -> Iterator[RecordingProxy]:
    with RecordingProxy(target) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()
