"""`--host` is judged by the address that it resolves to, however it is written."""

from __future__ import annotations

import contextlib
import socket

import pytest

from server.cli.banner import base_url
from server.config import ServerConfig
from server.http.addresses import address_of, is_loopback
from server.http.auth import allowed_hosts
from server.http.listener import listen


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
