"""The server of one model of several: `python -m server.cli.served_model FD`.

FD is a socket to the parent, `penstock serve A B`. It sends the configuration; see
`server.models.control`. The server listens on a Unix socket in a folder of the parent's, so only
the parent reaches it. It ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.client.imports import quick_imports
from engine.client.interface import EngineClient
from engine.client.subprocess import EngineProcess
from engine.errors import ConfigError, EngineDeadError
from server import exit_codes
from server.cli.clean_exit import standard_streams
from server.http.key_file import read_limited_keys
from server.http.listener import Listener
from server.models.control import Failed, Loaded, Loading, Report, Start, UsedTokens
from server.telemetry.logging import configure

PARENT_DIED = 4  # exit status; no process is left to read it
LOOK_S = 0.1  # between two looks at the progress of loading


class Parent:
    """The parent at the other end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def send(self, report: Report) -> None:
        """Send a report. A parent that has ended reads none; `_watch` then ends this process."""
        with contextlib.suppress(OSError):
            self._control.sendall(msgspec.json.encode(report) + b"\n")


def main() -> int:
    """Serve until the parent ends the process; return the exit status."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    stream = control.makefile("rb")
    if not (line := stream.readline()):
        return PARENT_DIED
    start = msgspec.json.decode(line, type=Start)
    threading.Thread(target=_watch, args=(stream, start.socket), daemon=True).start()
    configure(start.server)
    parent = Parent(control)
    try:
        return _serve(start, parent)
    except ConfigError as error:
        parent.send(Failed(str(error)))
        return exit_codes.BAD_CONFIG


def _watch(stream: BinaryIO, path: str) -> None:
    """End this process when the parent has ended. The engine ends with this process."""
    while stream.read(1 << 10):
        pass
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(Path(path).parent)  # works for the last model
    os._exit(PARENT_DIED)


def _serve(start: Start, parent: Parent) -> int:
    from engine.checkpoint.folder import model_folder
    from server.cli.model_source import check_weights

    check_weights(start.engine, model_folder(start.engine.model))
    # With a short queue, connections to a Unix socket are refused at once.
    listener = Listener(socket.AF_UNIX)
    listener.bind(start.socket)
    listener.listen()
    with EngineProcess(start.engine) as child, listener:  # it imports torch meanwhile
        with quick_imports():
            from engine.client.client import ProcessClient
            from server.app import create_app
            from server.cli.lifetime import Lifetime, run_lifetime
            from server.http.api_keys import ApiKeys
            from server.models.limits import UsedTokenReports

        client = ProcessClient(start.engine, child)
        reports = UsedTokenReports(lambda tokens: parent.send(UsedTokens(tokens)))
        keys = ApiKeys(partial(read_limited_keys, start.server), reports.limiter)
        app = create_app(start.server, start.engine, client, keys)
        announce = partial(_report_load, client, parent)
        lifetime = Lifetime(app, listener, _quiet, announce)
        status = run_lifetime(lifetime)
        if status:
            parent.send(Failed(lifetime.cause))
        return status


def _quiet(text: str) -> None:
    """Drop a message of the server's life; the parent writes its own."""


async def _report_load(client: EngineClient, parent: Parent) -> None:
    ready = asyncio.create_task(client.wait_ready())
    try:
        while not ready.done():
            parent.send(Loading(client.progress.stage, client.progress.fraction))
            await asyncio.wait({ready}, timeout=LOOK_S)
        with contextlib.suppress(EngineDeadError):
            ready.result()
            parent.send(Loaded())
    finally:
        ready.cancel()


if __name__ == "__main__":
    with standard_streams():
        status = main()
    sys.exit(status)
