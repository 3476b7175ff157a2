"""Which IP addresses count as public."""

from __future__ import annotations

import pytest

from server.images.public_addresses import is_public, plain_address

NOT_PUBLIC = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.1.2.3"),
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.168.1.1", "192.0.0.1", "192.0.0.9"),
    *("192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
    *("239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::10.0.0.1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00::1", "fec0::1"),
    *("ff02::1", "2001::1", "2001:db8::1", "2002:0a00:0001::1", "2002:0808:0808::1", "3fff::1"),
    *("100::1", "5f00::1", "64:ff9b:1::1", "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1"),
]
PUBLIC = [
    *("1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.32.0.1", "193.0.0.1"),
    *("2606:4700::1111", "2a00:1450::1", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"),
]


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_special_address_is_not_public(text: str) -> None:
    assert not is_public(plain_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_address_of_the_internet_is_public(text: str) -> None:
    assert is_public(plain_address(text))
