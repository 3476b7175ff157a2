"""A real uvicorn server on a free port around a FakeEngine, with HTTP and OpenAI clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import uvicorn

from engine.config import EngineConfig, Pooling
from server.app import create_app
from server.cli.lifetime import uvicorn_config
from server.config import ServerConfig
from server.http.errors import ANTHROPIC_PATH, OLLAMA_PATH, VLLM_PATH, VLLM_TYPES
from server.http.listener import listen
from tests.support.fake_engine import FakeEngine
from tests.support.prometheus import metric

# Tests set the log level of servers to debug. A request of the client would write ten lines.
logging.getLogger("httpcore2").setLevel(logging.WARNING)


class QuietServer(uvicorn.Server):
    """A server that keeps the test runner's signal handlers and stops without waiting a tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        await self.leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down without uvicorn's pause of 0.1 s, unless connections stay open."""
        state = self.server_state
        for listening in self.servers:
            listening.close()
        for connection in list(state.connections):
            connection.shutdown()
        for _ in range(20):
            if not state.connections and not state.tasks:
                break
            await asyncio.sleep(0.005)
        else:
            return await super().shutdown(sockets)
        for each in sockets or ():
            each.close()
        await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@dataclass
class Served:
    engine: FakeEngine
    port: int
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI
    app: Any
    connections: set[Any]  # open connections, as the server sees them

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    async def chat(self, **fields: Any) -> httpx2.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def message(self, **fields: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": "tiny", "max_tokens": 100, "messages": messages, **fields}
        return await self.http.post("/v1/messages", json=body)

    async def complete(self, **fields: Any) -> httpx2.Response:
        return await self.http.post("/v1/completions", json={"prompt": "Hi", **fields})

    async def metric(self, name: str, **labels: str) -> float:
        return metric((await self.http.get("/metrics")).text, name, **labels)


async def check_error(response: httpx2.Response) -> None:
    """Check the headers of every response and the body of every error, in every test."""
    assert response.headers["x-request-id"]
    assert response.headers["openai-version"]
    assert response.headers["openai-processing-ms"].isdecimal()
    assert "total;dur=" in response.headers["server-timing"]
    if 300 <= response.status_code < 400:  # of the pages, and without a body
        return
    assert response.request.method == "HEAD" or response.headers["content-type"]
    path = response.request.url.path
    if (
        response.is_success
        or path in ("/health", "/ping", "/ready")
        or response.request.method == "HEAD"
    ):
        return
    await response.aread()
    if ANTHROPIC_PATH.fullmatch(path):
        check_anthropic_error_body(response.json(), response.status_code)
        assert response.json()["request_id"] == response.headers["request-id"]
        return
    if OLLAMA_PATH.fullmatch(path):
        check_ollama_error_body(response.json(), response.status_code)
        return
    types = VLLM_TYPES if VLLM_PATH.fullmatch(path) else {}
    is_llamacpp = response.json()["error"]["type"] == "exceed_context_size_error"
    assert not (is_llamacpp and path.startswith("/v1/")), "OpenAI's routes have OpenAI's errors"
    check_error_body(response.json(), response.status_code, types)


def has_exception(record: logging.LogRecord) -> bool:
    """Return whether a log record has an exception; structlog makes it a part of the message."""
    words = record.msg if isinstance(record.msg, dict) else {}
    return bool(record.exc_info or words.get("exc_info") or words.get("exception"))


def check_error_body(body: Any, status: int, types: Mapping[int, str] = {}) -> None:
    """Check an error of OpenAI's form; `types` are other types that the path has."""
    assert list(body) == ["error"]
    error = dict(body["error"])
    if error["type"] == "exceed_context_size_error":  # llama.cpp's own routes add both lengths
        assert error.pop("n_prompt_tokens") > error.pop("n_ctx")
        error["type"] = "invalid_request_error"
    assert list(error) == ["message", "type", "param", "code"]
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    default = "server_error" if status >= 500 else "invalid_request_error"
    assert error["type"] == types.get(status, kinds.get(status, default))
    assert status != 422
    assert isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    if status >= 500:
        assert not re.search(r"0x|/home|Traceback|File \"", error["message"])


def check_anthropic_error_body(body: Any, status: int) -> None:
    assert list(body) == ["type", "error", "request_id"]
    assert body["type"] == "error"
    assert list(body["error"]) == ["type", "message"]
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    default = "api_error" if status >= 500 else "invalid_request_error"
    assert body["error"]["type"] == kinds.get(status, default)
    if status >= 500:
        assert not re.search(r"0x|/home|Traceback|File \"", body["error"]["message"])


def check_ollama_error_body(body: Any, status: int) -> None:
    assert list(body) == ["error"]
    assert isinstance(body["error"], str)
    if status >= 500:
        assert not re.search(r"0x|/home|Traceback|File \"", body["error"])


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine,
    model: Path,
    key: str | None = None,
    send_buffer: int | None = None,
    keep_alive: float = 75,
    lora_modules: tuple[str, ...] = (),
    pooling: Pooling | None = None,
    **fields: Any,
) -> AsyncIterator[Served]:
    config = ServerConfig(**{"port": 0, "log_level": "debug", "log_format": "json"} | fields)
    engine_config = EngineConfig(model=str(model), lora_modules=lora_modules, pooling=pooling)
    app = create_app(config, engine_config, engine)
    listener = listen(config)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    server = QuietServer(uvicorn_config(app, keep_alive))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await eventually(lambda: server.started or task.done(), "uvicorn has started")
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    hooks = {"response": [check_error]}
    try:
        async with (
            # verify=False: reading the certificate store is slower than everything else here
            httpx2.AsyncClient(
                base_url=url, headers=headers, timeout=30, event_hooks=hooks, verify=False
            ) as http,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key=key or "-",
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=False),
            ) as sdk,
        ):
            yield Served(engine, port, http, sdk, app, server.server_state.connections)
    finally:
        server.leave.set()
        await asyncio.wait({task}, timeout=10)
        server.force_exit = True
        await task
        listener.close()


async def eventually(condition: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 20 s: {what}")
