"""`penstock run MODEL`: start a server for MODEL, chat with it, and end it again."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

import httpx2
from rich.console import Console

from engine.client.module_command import python_module
from engine.errors import ConfigError

POLL_S = 0.1
LAST_LINES = 5  # of a failed server's log, shown to the user


@contextlib.contextmanager
def served(model: str) -> Iterator[tuple[str, str]]:
    """Serve `model` on a free loopback port and yield (url, key) once it is ready.

    The server ends with the block. Its random key keeps other users of the machine out. Raises
    ConfigError with the server's last lines if it cannot start.
    """
    port = _free_port()
    key = secrets.token_urlsafe(24)
    command = [*python_module("server"), "serve", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--no-access-log", "--log-format", "console"]
    environment = os.environ | {"PENSTOCK_API_KEY": key}
    with tempfile.TemporaryFile("w+") as log:
        server = None
        try:
            with _signals_later():
                # Ctrl-C stops an answer of the chat: it must not reach the server.
                server = subprocess.Popen(
                    command, env=environment, stderr=log, start_new_session=True
                )
            url = f"http://127.0.0.1:{port}"
            if not _is_ready(server, url):
                log.seek(0)
                raise ConfigError(_reason(log.read(), server.returncode))
            yield url, key
        finally:
            if server is not None:
                server.terminate()
                server.wait()


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Handle signals that end this process at the end of the block.

    In the middle of Popen their exception would leave a server that nothing ends. Blocked signals
    would stay blocked in the server.
    """
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # under nohup; the server inherits it
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arrived in came:
            signal.raise_signal(arrived)


def _reason(log: str, status: int) -> str:
    """Return why a server did not start: the last lines of its log."""
    lines = log.strip().splitlines()[-LAST_LINES:]
    if not lines:
        return f"The server ended with status {status}."
    return "\n".join(line.removeprefix("penstock: ") for line in lines)


def _is_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server is ready, with its stage on stderr. Returns False if it has ended."""
    transport = httpx2.HTTPTransport(trust_env=False)  # no proxy reaches a loopback address
    client = httpx2.Client(base_url=url, transport=transport, timeout=5)
    with client, Console(stderr=True).status("starting") as status:
        while server.poll() is None:
            with contextlib.suppress(httpx2.HTTPError, ValueError, LookupError):
                answer = client.get("/ready")
                if answer.is_success:
                    return True
                status.update(answer.json()["stage"])
            time.sleep(POLL_S)
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
