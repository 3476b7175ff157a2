"""The listening socket, taken before the model is loaded so that a clash costs no minutes."""

from __future__ import annotations

import errno
import math
import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from server.config import ServerConfig

BACKLOG = 2048
INT32 = 2**31 - 1
LISTENING = "0A"  # st in /proc/net/tcp


class Listener(socket.socket):
    """Lets BACKLOG connections wait, and has asyncio accept one, or two, in each turn of its loop.

    One number says both to asyncio, which out of descriptors tries as often again as it may accept
    at once, a second later, and each of these tries does the same: soon it does nothing else.
    """

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)


class ListenError(Exception):
    """The address cannot be listened on; the text says why and which flag changes it."""


def listen(config: ServerConfig) -> socket.socket:
    """A listening TCP socket on `host` and `port`; raises ListenError."""
    try:
        found = _resolve(config.host, config.port)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(f"--host {config.host} is not an address or name here: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _cut_off_readers_that_stall(listener, config.send_timeout)
        listener.bind(address)
        # At once: with SO_REUSEADDR two processes may bind a port until one of them listens.
        listener.listen()
    except OSError as error:
        listener.close()
        raise ListenError(_explain(config, error)) from None
    return listener


def _cut_off_readers_that_stall(listener: socket.socket, seconds: float) -> None:
    """Has the kernel do it (RFC 5482), for every connection accepted here: a closed transport would
    wait for ever to flush. Where the system cannot, only streams are cut off, by their own clock.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = min(math.ceil(seconds * 1000), INT32)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _resolve(host: str, port: int, flags: int = 0) -> list[Any]:
    """Brackets, as a URL has them around an address of IPv6, are no part of it."""
    flags |= socket.AI_PASSIVE
    return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=flags)


def address_of(host: str, *, look_up: bool = True) -> IPv4Address | IPv6Address | None:
    """What `listen` binds `host` to: 127.1, 0 and names of this machine are addresses, too. None
    where it is none, or without `look_up` a name."""
    try:
        *_, address = _resolve(host, 0, 0 if look_up else socket.AI_NUMERICHOST)[0]
        found = ip_address(address[0])
    except (OSError, ValueError):
        return None
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def is_loopback(host: str, *, look_up: bool = True) -> bool:
    """Whether a server bound to `host` is reached from this machine only. `localhost` is no name to
    look up (RFC 6761, section 6.3)."""
    address = address_of("127.0.0.1" if host == "localhost" else host, look_up=look_up)
    return address is not None and address.is_loopback


def _explain(config: ServerConfig, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {config.port} is in use{_holder(config.port)}. "
            "Stop that process or take another port with --port (0 takes a free one)."
        )
    if error.errno == errno.EACCES:
        return (
            f"Port {config.port} is privileged for this user. Take one above 1023 with --port, "
            "or grant CAP_NET_BIND_SERVICE."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {config.host} is not an address of this machine; 0.0.0.0 means all."
    return (
        f"Cannot listen on {config.host} port {config.port}: {error.strerror}. See --host, --port."
    )


def _holder(port: int) -> str:
    """` by process 12 (nginx)` where /proc shows it to this user, else nothing."""
    sockets = set()
    for table in filter(Path.exists, (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))):
        for fields in map(str.split, table.read_text().splitlines()[1:]):
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        try:
            if os.readlink(link) in sockets:
                process = link.parent.parent
                # Not its command line, which may hold a key and would go to our log.
                name = (process / "comm").read_text(errors="replace").strip()
                return f" by process {process.name} ({name})"
        except OSError:
            continue  # another user's process, or one that has ended
    return ""
