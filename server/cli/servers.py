"""The Penstock servers that run on this machine: find them, show them (`ps`), end them (`stop`).

A server keeps no file about itself. Its processes are found by their command line, its address by
the socket it listens on, its model by asking it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx2
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.errors import printable

ASK_S = 2.0  # for a server to answer a question about itself
POLL_S = 0.05
DEFAULT_URL = "http://127.0.0.1:8000"
UNKNOWN = "?"  # shown for a server whose model is set by a file or the environment


@dataclass(frozen=True)
class RunningServer:
    """One `penstock serve` process of this user."""

    process: psutil.Process
    url: str  # empty until it listens
    models: tuple[str, ...]
    state: str  # the status of /ready, or "starting"
    given: str = UNKNOWN  # the model on its command line

    @property
    def title(self) -> str:
        """The names of its model, if they can be read, else the name on its command line."""
        return ", ".join(self.models) or self.given

    def matches(self, wanted: str) -> bool:
        """Whether `wanted` is this server's process id, port, URL or a name of its model."""
        port = self.url.rpartition(":")[2]
        return wanted in (str(self.process.pid), port, self.url, self.given, *self.models)


class ServerChoiceError(Exception):
    """No server, or more than one, fits what was given; the text says what to do."""


def is_serve_command(arguments: Sequence[str]) -> bool:
    """Whether this command line is `penstock serve …` or `python -m server serve …`.

    A program that runs such a command, such as `timeout`, is no server.
    """
    if "serve" not in arguments:
        return False
    before = [part.rpartition("/")[2] for part in arguments[: arguments.index("serve")]]
    if before == ["penstock"]:
        return True
    is_python = bool(before) and before[0].startswith("python")
    return is_python and (before[-1] == "penstock" or before[-2:] == ["-m", "server"])


def running_servers(api_key: str = "") -> Iterator[RunningServer]:
    """Yield the servers of this user, the oldest first. `api_key` may open their list of models."""
    for process in _serve_processes():
        yield _described(process, api_key)


def default_url() -> str:
    """Return the URL of the server that a client means without naming one.

    That is the one on port 8000, or else the only one that this user runs. Raises ServerChoiceError
    if there are several others.
    """
    urls = [url for process in _serve_processes() if (url := _url_of(process))]
    if not urls or DEFAULT_URL in urls:
        return DEFAULT_URL
    if len(urls) > 1:
        raise ServerChoiceError(f"{len(urls)} servers are running: give --url ({', '.join(urls)}).")
    return urls[0]


def _serve_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            is_own = process.uids().real == os.getuid()
            if is_own and is_serve_command(_arguments(process)):
                found.append((process.create_time(), process))
        except psutil.Error:
            continue  # it has ended, or belongs to the system
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def _described(process: psutil.Process, api_key: str) -> RunningServer:
    url = _url_of(process)
    given = _given_model(process)
    if not url:
        return RunningServer(process, "", (), "starting", given)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx2.HTTPTransport(trust_env=False)  # no proxy reaches a loopback address
    with httpx2.Client(base_url=url, headers=headers, timeout=ASK_S, transport=transport) as client:
        try:
            state = str(client.get("/ready").json()["status"])
            answer = client.get("/v1/models")
            names = [model["id"] for model in answer.json()["data"]] if answer.is_success else []
        except (httpx2.HTTPError, ValueError, LookupError, TypeError):
            return RunningServer(process, url, (), "not answering", given)
    return RunningServer(process, url, tuple(names), "ready" if state == "ok" else state, given)


def _arguments(process: psutil.Process) -> list[str]:
    """Return the command line. A process that masks its secrets has it in one text."""
    arguments = [argument for argument in process.cmdline() if argument]
    return arguments[0].split(" ") if len(arguments) == 1 else arguments


def _given_model(process: psutil.Process) -> str:
    """Return the model of the command line `serve MODEL …`."""
    try:
        arguments = _arguments(process)
    except psutil.Error:
        return UNKNOWN
    rest = arguments[arguments.index("serve") + 1 :] if "serve" in arguments else []
    return rest[0] if rest and not rest[0].startswith("-") else UNKNOWN


def _url_of(process: psutil.Process) -> str:
    """Return the URL that reaches the process from this machine; empty if it does not listen."""
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN:
            host = connection.laddr.ip
            if host in ("0.0.0.0", "::"):
                host = "127.0.0.1" if host == "0.0.0.0" else "::1"
            host = f"[{host}]" if ":" in host else host
            return f"http://{host}:{connection.laddr.port}"
    return ""


def stop_server(servers: Sequence[RunningServer], wanted: str | None) -> str:
    """Send SIGTERM to the server that `wanted` names, wait for its end, and return its name.

    Raises ServerChoiceError if none or several fit.
    """
    found = [server for server in servers if wanted is None or server.matches(wanted)]
    if not found:
        what = "No Penstock server is running" if wanted is None else f"No server fits {wanted!r}"
        raise ServerChoiceError(f"{what}. `penstock ps` lists the running ones.")
    if len(found) > 1:
        known = ", ".join(f"{server.title} (process {server.process.pid})" for server in found)
        raise ServerChoiceError(
            f"{len(found)} servers fit: name one by its port or process id. They are {known}."
        )
    [server] = found
    server.process.terminate()
    while _is_alive(server.process):
        time.sleep(POLL_S)
    return f"{server.title} (process {server.process.pid})"


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs. A zombie has ended; only its parent has not noticed."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def table_of(servers: Sequence[RunningServer]) -> str:
    """Return the servers as a table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="")
    for heading in ("MODEL", "URL", "STATE", "PID", "UP"):
        table.add_column(heading, no_wrap=True)
    for server in servers:
        pid = str(server.process.pid)
        cells = server.title, server.url or "-", server.state, pid, _age(server.process)
        table.add_row(*[Text(printable(cell)) for cell in cells])  # a name may look like markup
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _age(process: psutil.Process) -> str:
    """Return how long a process has run, in its largest unit."""
    seconds = int(time.time() - process.create_time())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
