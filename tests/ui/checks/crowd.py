"""A request with two neighbours, as its client and a viewer see it."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx2

from tests.support.process import eventually
from tests.support.serve import Server
from tests.ui.checks.watcher import Watcher
from tests.ui.checks.waterfall import Measured

UI = {"x-penstock-ui": "1"}
CALM_MS = 20  # a client's time beyond the server's
ATTEMPTS = 6


def crowded_request(server: Server, watcher: Watcher, name: str) -> tuple[str, Measured]:
    """Run a request with two others until the machine lets the client measure it well.

    Return its x-request-id and what was measured.
    """
    for attempt in range(ATTEMPTS):
        request = f"{name}-{attempt}"
        with httpx2.Client(base_url=server.base_url, timeout=60) as http:
            http.get("/v1/models")  # opens the connection
            milliseconds = _run(http, server, request)
            report: dict[str, Any] = http.get(f"/ui/api/requests/{request}", headers=UI).json()
        if 0 <= milliseconds - report["wall_ms"] < CALM_MS:
            return request, _measured(watcher, request, milliseconds)
    raise AssertionError(f"this machine is never calm for {CALM_MS} ms")


def _run(http: httpx2.Client, server: Server, name: str) -> float:
    """Return the milliseconds that the stream took; the neighbours come while it is read."""
    threads = []
    begin = time.monotonic()
    with _stream(http, name, "A river", 120) as response:
        for _ in response.iter_bytes():
            if not threads:
                for neighbour, prompt, tokens in (("long", _long(), 3), ("lake", "A lake", 9)):
                    given = (server, f"{name}-{neighbour}", prompt, tokens)
                    threads.append(threading.Thread(target=_send, args=given))
                    threads[-1].start()
    milliseconds = 1000 * (time.monotonic() - begin)
    for thread in threads:
        thread.join()
    return milliseconds


def _long() -> list[int]:
    """A prompt of 900 tokens that no earlier one begins like."""
    first = time.monotonic_ns() % 1000
    return [first, *(5 + place % 1000 for place in range(899))]


def _stream(http: httpx2.Client, name: str, prompt: Any, tokens: int) -> Any:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {**UI, "x-request-id": name}
    return http.stream("POST", "/v1/completions", json=body, headers=headers)


def _send(server: Server, name: str, prompt: Any, tokens: int) -> None:
    with (
        httpx2.Client(base_url=server.base_url, timeout=60) as http,
        _stream(http, name, prompt, tokens) as response,
    ):
        response.read()


def _measured(watcher: Watcher, request: str, milliseconds: float) -> Measured:
    names = {f"{request}-long": 900, f"{request}-lake": 2}

    def has_all() -> bool:
        return all(watcher.ids_of(name) for name in (request, *names)) and len(own()) == 120

    def own() -> list[Any]:
        return watcher.steps_of(watcher.ids_of(request))

    eventually(has_all, "the viewer has seen all steps")
    neighbours = {name: (tokens, watcher.ids_of(name)) for name, tokens in names.items()}
    return Measured(watcher.ids_of(request), milliseconds, own(), neighbours)
