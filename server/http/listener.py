"""The listening socket, bound before the model loads, so that a port conflict shows at once."""

from __future__ import annotations

import errno
import math
import socket
from typing import Any

from server.config import ServerConfig
from server.http.addresses import resolve

BACKLOG = 2048
ACCEPTED_AT_ONCE = 16  # connections in one turn of the event loop
INT32 = 2**31 - 1


class Listener(socket.socket):
    """A socket that always listens with BACKLOG, the length of the accept queue.

    asyncio uses its `backlog` for two things: the accept queue, and the number of connections it
    accepts per turn of the event loop. That is ACCEPTED_AT_ONCE, which this class ignores for the
    queue. If descriptors run out, asyncio would make as many attempts, schedule a retry for each,
    and soon do nothing else. So the attempt behind a failed one ends the turn.
    """

    _has_failed = False

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError right after another error."""
        if self._has_failed:
            self._has_failed = False
            raise BlockingIOError
        try:
            return super().accept()
        except BlockingIOError:
            raise
        except OSError:
            self._has_failed = True
            raise


class ListenError(Exception):
    """The address cannot be listened on. The message says why and which flag to change."""


def listen(config: ServerConfig) -> socket.socket:
    """Return a TCP socket that listens on the configured host and port. Raises ListenError."""
    try:
        found = resolve(config.host, config.port)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(f"--host {config.host} cannot be resolved: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _cut_off_readers_that_stall(listener, config.send_timeout)
        listener.bind(address)
        # Listen at once: with SO_REUSEADDR two processes can bind a port until one listens.
        listener.listen()
    except OSError as error:
        listener.close()
        raise ListenError(_explain(config, error)) from None
    return listener


def _cut_off_readers_that_stall(listener: socket.socket, seconds: float) -> None:
    """Set TCP_USER_TIMEOUT (RFC 5482) for all connections that the listener accepts.

    The kernel must close them, because asyncio waits without limit to flush a closed transport.
    On systems without the option, only streams are cut off, by a timer in `server.generation.sse`.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = min(math.ceil(seconds * 1000), INT32)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _explain(config: ServerConfig, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {config.port} is in use{_holder(config.port)}. "
            "Stop that process or choose another port with --port (0 selects a free port)."
        )
    if error.errno == errno.EACCES:
        return (
            f"Port {config.port} is not permitted for this user. "
            "Choose a port above 1023 with --port, or grant CAP_NET_BIND_SERVICE."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {config.host} is not an address of this machine; 0.0.0.0 listens on all."
    return (
        f"Cannot listen on {config.host} port {config.port}: {error.strerror}. See --host, --port."
    )


def _holder(port: int) -> str:
    """Return ` by process 12 (nginx)` if this user may see the process, else ""."""
    import psutil  # not at the top: only this error needs it

    for process in psutil.process_iter():
        try:
            connections = process.net_connections("tcp")
            # Not the command line: it may contain an API key, and this text is logged.
            name = process.name()
        except psutil.Error:
            continue  # another user's process, or one that has ended
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return f" by process {process.pid} ({name})"
    return ""
