"""Whether an IP address belongs to the public internet.

An address that a request names may lead into the operator's own network. `ipaddress.is_global`
follows IANA's registries of special addresses, but older patch releases of Python lack some
entries, which are listed here too.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

IPAddress = IPv4Address | IPv6Address

NOT_PUBLIC_4 = (
    IPv4Network("100.64.0.0/10"),  # shared by the customers of a provider (RFC 6598)
    IPv4Network("192.0.0.0/24"),  # protocol assignments (RFC 6890)
    IPv4Network("192.88.99.0/24"),  # relays of 6to4 (RFC 7526)
)
UNICAST_6 = IPv6Network("2000::/3")  # all public IPv6 addresses but those of NAT64
NOT_PUBLIC_6 = (
    IPv6Network("2001::/23"),  # protocol assignments, such as Teredo (RFC 2928)
    IPv6Network("2001:db8::/32"),  # documentation (RFC 3849)
    IPv6Network("2002::/16"),  # 6to4, which holds an IPv4 address (RFC 3056)
    IPv6Network("3fff::/20"),  # documentation (RFC 9637)
)
NAT64 = IPv6Network("64:ff9b::/96")  # holds an IPv4 address (RFC 6052)


def plain_address(text: str) -> IPAddress:
    """Return the address in `text`, and the IPv4 address inside a mapped or NAT64 one.

    Raises ValueError if `text` is not an address.
    """
    address = ip_address(text)
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: IPAddress) -> bool:
    """Return whether a result of `plain_address` is public unicast."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in NOT_PUBLIC_4)
    return address in UNICAST_6 and not any(address in network for network in NOT_PUBLIC_6)
