"""The addresses of a host name, and whether they lead to this machine only."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from server.config import ServerConfig


def resolve(host: str, port: int, flags: int = 0) -> list[Any]:
    """Return getaddrinfo's results for `host`, which may be an IPv6 address in brackets."""
    flags |= socket.AI_PASSIVE
    return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=flags)


def address_of(host: str, *, look_up: bool = True) -> IPv4Address | IPv6Address | None:
    """Return the IP address that `listen` binds `host` to, or None if there is none.

    `host` may also be a short form such as 127.1 or 0, or a name of this machine. Without
    `look_up`, names are not resolved and give None.
    """
    try:
        *_, address = resolve(host, 0, 0 if look_up else socket.AI_NUMERICHOST)[0]
        found = ip_address(address[0])
    except (OSError, ValueError):
        return None
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def is_loopback(host: str, *, look_up: bool = True) -> bool:
    """Return whether a server bound to `host` is reachable from this machine only.

    `localhost` is never looked up (RFC 6761, section 6.3).
    """
    address = address_of("127.0.0.1" if host == "localhost" else host, look_up=look_up)
    return address is not None and address.is_loopback


def serves_ui(config: ServerConfig) -> bool:
    """Whether the built-in pages and /ui/api are served: --ui, by default on loopback only."""
    return is_loopback(config.host) if config.ui is None else config.ui
