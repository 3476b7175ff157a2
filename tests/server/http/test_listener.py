"""`--host` is judged by the address that it resolves to, however it is written."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Any, NoReturn

import pytest

from server.cli.banner import base_url
from server.config import ServerConfig
from server.http.addresses import address_of, is_loopback
from server.http.auth import allowed_hosts
from server.http.listener import ACCEPTED_AT_ONCE, listen


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "127.9.9.9", "localhost", "LOCALHOST"],
)
def test_is_loopback_accepts_all_notations_of_ipv4(host: str) -> None:
    assert is_loopback(host)
    with contextlib.closing(listen(ServerConfig(host=host, port=0))) as listener:
        bound = listener.getsockname()[0]
    assert {host.lower(), bound, "localhost"} <= allowed_hosts(host)


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"])
def test_is_loopback_accepts_all_notations_of_ipv6(host: str) -> None:
    assert is_loopback(host)
    assert "localhost" in allowed_hosts(host)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    with contextlib.closing(listen(ServerConfig(host=host, port=0))) as listener:
        assert is_loopback(listener.getsockname()[0])


@pytest.mark.parametrize(
    "host", ["0", "0.0.0.0", "0x0", "::", "0::0", "::ffff:0.0.0.0", "10.1.2.3", "nowhere.invalid"]
)
def test_is_loopback_rejects_wildcard_and_other_addresses(host: str) -> None:
    assert not is_loopback(host)
    assert allowed_hosts(host) == frozenset()


def test_address_of_without_look_up_resolves_no_names() -> None:
    assert address_of("localhost", look_up=False) is None
    assert is_loopback("localhost", look_up=False)
    assert is_loopback("127.1", look_up=False)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0", "http://127.0.0.1:8"), ("0.0.0.0", "http://127.0.0.1:8"), ("0::0", "http://[::1]:8"),
        ("10.1.2.3", "http://10.1.2.3:8"), ("fe80::1", "http://[fe80::1]:8"),
        ("[fe80::1]", "http://[fe80::1]:8"),
    ],
)  # fmt: skip
def test_base_url_replaces_wildcard_with_loopback(host: str, url: str) -> None:
    assert base_url(host, 8) == url


async def test_listener_out_of_descriptors_fails_once_in_a_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio schedules a retry for each failed attempt."""
    failed: list[dict[str, Any]] = []

    def fail(self: socket.socket) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failed.append(context))
    listener = listen(ServerConfig(host="127.0.0.1", port=0))
    listener.setblocking(False)
    server = await loop.create_server(asyncio.Protocol, sock=listener, backlog=ACCEPTED_AT_ONCE)
    async with server:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", fail)
            with socket.create_connection(listener.getsockname()):
                for _ in range(20):
                    await asyncio.sleep(0)
        assert len(failed) == 1
        connection, _ = listener.accept()
        connection.close()
