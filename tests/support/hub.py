"""A server on 127.0.0.1 that implements the part of huggingface.co's protocol that `pull` uses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "RepoNotFound": 404,
    "RevisionNotFound": 404,
    "GatedRepo": 403,
    "Unauthorized": 401,
    "Unavailable": 503,
    "NoHub": 404,
}


@dataclass(frozen=True)
class Seen:
    """A request that the hub received."""

    method: str
    path: str
    range: str | None
    token: str | None
    host: str

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass
class Hub:
    """One repository, with fields that inject faults. Each drop happens once."""

    name: str
    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT)
    sizes: dict[str, int] = field(default_factory=dict)  # false sizes to report, by file
    refuses: str = ""  # a key of REFUSALS: the response to every look-up
    gated: bool = False
    drops: list[int] = field(default_factory=list)  # bytes after which a connection is dropped
    resets: bool = False  # drop connections with a TCP reset instead of a close
    stalls: bool = False  # stop sending instead of dropping the connection
    ignores_range: bool = False
    cdn: bool = False  # redirect large files to another host
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    def large(self, file: str) -> bool:
        return file.endswith((".safetensors", ".bin", ".gguf"))

    def listing(self) -> dict[str, Any]:
        siblings = []
        for file, content in self.files.items():
            entry = {"rfilename": file, "size": self.sizes.get(file, len(content))}
            entry["blobId"] = hashlib.sha1(content).hexdigest()
            if self.large(file):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return {"id": self.name, "modelId": self.name, "sha": COMMIT, "siblings": siblings}

    def requests(self, method: str, file: str = "") -> list[Seen]:
        return [s for s in self.seen if s.method == method and (not file or s.file == file)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer  # type: ignore[assignment]

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.server.hub_of(path)
        token, host = self.headers["authorization"], self.headers["host"]
        hub.seen.append(Seen(self.command, path, self.headers["range"], token, host))
        name = re.escape(hub.name)
        if api := re.fullmatch(f"/api/models/{name}(?:/revision/(.+))?", path):
            self.look_up(hub, api[1] or "main")
        elif found := re.fullmatch(f"/(?:cdn|{name}/resolve/{COMMIT})/(.+)", path):
            self.send_file(hub, found[1], on_cdn=path.startswith("/cdn/"))
        else:
            self.refuse("RepoNotFound")

    def look_up(self, hub: Hub, revision: str) -> None:
        if hub.refuses:
            self.refuse(hub.refuses)
        elif revision not in hub.revisions:
            self.refuse("RevisionNotFound")
        else:
            body = json.dumps(hub.listing()).encode()
            self.headers_only(200, {"content-type": "application/json"}, len(body))
            self.wfile.write(body)

    def refuse(self, code: str) -> None:
        headers = {} if code in ("Unavailable", "NoHub") else {"x-error-code": code}
        if code == "Unauthorized":
            headers = {"x-error-message": "Invalid credentials in Authorization header"}
        self.headers_only(REFUSALS[code], headers, 0)

    def headers_only(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for key, value in {**headers, "content-length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()

    def send_file(self, hub: Hub, name: str, *, on_cdn: bool) -> None:
        if hub.gated and not (on_cdn or self.headers["authorization"]):
            return self.refuse("GatedRepo")
        content = hub.files[name]
        etag = (hashlib.sha256 if hub.large(name) else hashlib.sha1)(content).hexdigest()
        headers = {"x-repo-commit": COMMIT, "etag": f'"{etag}"'}
        if hub.cdn and hub.large(name) and not on_cdn:
            headers |= {"x-linked-etag": f'"{etag}"', "x-linked-size": str(len(content))}
            headers["location"] = f"http://localhost:{self.server.server_port}/cdn/{name}"
            return self.headers_only(302, headers, 0)
        begin = 0
        if (asked := self.headers["range"]) and not hub.ignores_range:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["content-range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self.headers_only(206 if "content-range" in headers else 200, headers, len(content) - begin)
        if self.command == "GET":
            self.send_body(hub, content[begin:], cut=hub.large(name) and bool(hub.drops))

    def send_body(self, hub: Hub, body: bytes, *, cut: bool) -> None:
        if not cut:
            self.wfile.write(body)
            return
        self.wfile.write(body[: hub.drops.pop(0)])
        self.wfile.flush()
        if hub.stalls:
            self.server.ending.wait()
        if hub.resets:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hubs: tuple[Hub, ...]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hubs = hubs
        self.ending = threading.Event()

    def hub_of(self, path: str) -> Hub:
        """Return the repository that a path names, else the first one."""
        named = [hub for hub in self.hubs if f"/{hub.name}/" in f"{path}/"]
        return named[0] if named else self.hubs[0]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that were killed."""


@contextlib.contextmanager
def serving_hub(hub: Hub, *more: Hub) -> Iterator[Hub]:
    """Serve one repository or several, and yield the first."""
    with HubServer((hub, *more)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.ending.set()
            server.shutdown()
            thread.join()
