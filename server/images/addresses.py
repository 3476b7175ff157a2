"""ImageAddresses: fetch images from the hosts that the operator lists, and from no others.

An address in a request makes this server a client inside the operator's network. So nothing is
fetched by default, and `--image-hosts` lists what may be. Each IP address of a listed host is
checked, and the connection goes to a checked address: a second DNS answer is never looked up.
Redirects and proxies are not followed. Bytes and time are bounded.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING

import structlog

from engine.errors import ConfigError
from server.images.data_url import MAX_IMAGE_BYTES
from server.images.errors import ImageError
from server.images.public_addresses import IPAddress, is_public, plain_address

if TYPE_CHECKING:  # a server that fetches nothing does not import it
    import httpx2

FETCH_S = 10.0  # for name, connection and all bytes of an image
CONNECT_S = 3.0  # for each IP address of the host
MAX_FETCHES = 16  # at the same time
MAX_ADDRESS = 8192  # characters
PORTS = {"http": 80, "https": 443}
ENTRY = re.compile(r"(?:\[(?P<bracketed>[^]]+)\]|(?P<host>[^:]+))(?::(?P<port>[0-9]{1,5}))?")
INSTEAD = "Send the image as a data: URL."

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # from host and port to IP addresses
log = structlog.get_logger("server.images")


@dataclass(frozen=True)
class Entry:
    """One value of --image-hosts: a name, `*.NAME`, an IP address or a network; with a port."""

    name: str  # lower case; empty if there is a network
    network: IPv4Network | IPv6Network | None
    port: int | None  # None: 80 and 443

    def has(self, address: IPAddress) -> bool:
        return self.network is not None and address in self.network

    def matches(self, host: str, port: int) -> bool:
        """Return whether requests may name this host and port."""
        if port not in (PORTS.values() if self.port is None else (self.port,)):
            return False
        if self.network is not None:
            address = _address(host)
            return address is not None and self.has(address)
        if self.name.startswith("*."):
            return host.endswith(self.name[1:]) and host != self.name[1:]
        return host == self.name


def read_entry(text: str) -> Entry:
    """Return one value of --image-hosts. Raises ConfigError."""
    match = ENTRY.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(
            f"--image-hosts: {text!r} is not a host name, *.NAME, an IP address or a network, "
            "with or without :PORT; IPv6 needs brackets."
        )
    host = match["bracketed"] or match["host"]
    port = int(match["port"]) if match["port"] else None
    is_network = bool(match["bracketed"] or "/" in host or _address(host))
    try:
        return Entry("" if is_network else host, ip_network(host) if is_network else None, port)
    except ValueError as error:
        raise ConfigError(f"--image-hosts: {text!r} is not a network: {error}.") from error


def _address(host: str) -> IPAddress | None:
    try:
        return plain_address(host)
    except ValueError:
        return None


def _port(url: httpx2.URL) -> int:
    return PORTS[url.scheme] if url.port is None else url.port


async def look_up(host: str, port: int) -> list[str]:
    """Return the IP addresses of `host`. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class ImageAddresses:
    """Fetches images. `hosts` are the values of --image-hosts, perhaps with commas inside.

    Raises ConfigError.
    """

    def __init__(self, hosts: Sequence[str], resolve: Resolve = look_up) -> None:
        entries = [entry for host in hosts for entry in host.split(",")]
        self._entries = [read_entry(entry) for entry in entries]
        self._resolve = resolve
        self._slots = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(self, address: str) -> bytes:
        """Return the bytes at an http or https address. Raises ImageError."""
        url = self._checked(address)
        async with self._slots:
            try:
                async with asyncio.timeout(FETCH_S):
                    return await self._download(url, await self._reachable(url))
            except TimeoutError:
                raise ImageError(
                    f"The image did not arrive from {url.host} within {FETCH_S:g} s."
                ) from None

    def _checked(self, address: str) -> httpx2.URL:
        """Return the parsed address of a listed host. Raises ImageError."""
        if not self._entries:
            raise ImageError(
                "This server fetches no images from addresses. Send the image as a data: URL, or "
                "let its operator start it with --image-hosts HOST[,HOST]."
            )
        if len(address) > MAX_ADDRESS:
            raise ImageError(f"The image's address has more than {MAX_ADDRESS} characters.")
        import httpx2

        try:
            url = httpx2.URL(address)
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise ImageError(f"The image's address is not a valid URL: {error}.") from None
        if url.scheme not in PORTS:
            raise ImageError(f"Addresses of images begin with https:// or http://. {INSTEAD}")
        if url.userinfo:
            raise ImageError(f"The image's address must not contain a user name. {INSTEAD}")
        host = url.raw_host.decode("ascii").lower()
        if not any(entry.matches(host, _port(url)) for entry in self._entries):
            raise ImageError(f"This server fetches no images from {url.netloc.decode()}. {INSTEAD}")
        return url

    async def _reachable(self, url: httpx2.URL) -> list[str]:
        """Return the IP addresses of the host, all of them allowed. Raises ImageError.

        An address that is not public must be listed itself, or in a network. The message does not
        quote it, since clients could otherwise look up names of the operator's network.
        """
        host = url.raw_host.decode("ascii")
        if _address(host) is not None:  # it is listed, as `_checked` found
            return [host]
        try:
            found = await self._resolve(host, _port(url))
        except OSError:
            found = []
        if not found:
            raise ImageError(f"The host {url.host} has no IP address.")
        for text in found:
            if not self._is_allowed(text, _port(url)):
                log.warning("image host has an address that is not public", host=host, found=text)
                raise ImageError(f"The host {url.host} has an address that is not public.")
        return list(dict.fromkeys(found))

    def _is_allowed(self, text: str, port: int) -> bool:
        """Return whether an IP address of a listed name may be connected to."""
        address = _address(text)
        if address is None or "%" in text:  # one with a zone, such as fe80::1%eth0
            return False
        if is_public(address):
            return True
        entries = [entry for entry in self._entries if entry.port in (None, port)]
        return any(entry.has(address) for entry in entries)

    async def _download(self, url: httpx2.URL, addresses: Sequence[str]) -> bytes:
        """Return the body that the first address with a connection sends."""
        import httpx2

        for address in addresses:
            try:
                return await self._download_from(url, address)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                log.info("no connection to an image host", host=url.host, error=str(error))
            except httpx2.HTTPError as error:
                log.info("image host broke off", host=url.host, error=repr(error))
                raise ImageError(f"The transfer of the image from {url.host} failed.") from None
        raise ImageError(f"No connection to {url.host} could be made.")

    async def _download_from(self, url: httpx2.URL, address: str) -> bytes:
        """Connect to `address`. The Host header and the certificate are those of the URL's name."""
        headers = {"host": url.netloc.decode("ascii"), "accept-encoding": "identity"}
        name = {"sni_hostname": url.raw_host.decode("ascii")}
        target = url.copy_with(host=address, fragment=None)
        async with self._client.stream("GET", target, headers=headers, extensions=name) as response:
            if response.is_redirect:
                raise ImageError(
                    f"{url.host} answered with a redirect, which is not followed. Send the address "
                    "that it leads to."
                )
            if response.status_code != 200:
                raise ImageError(f"{url.host} answered with status {response.status_code}.")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ImageError(f"{url.host} compressed the image, which was not requested.")
            return await _bounded(response)

    @cached_property
    def _client(self) -> httpx2.AsyncClient:
        import httpx2

        # A kept connection is chosen by IP address. It could belong to another name there, whose
        # certificate says nothing about this one.
        limits = httpx2.Limits(max_keepalive_connections=0)
        transport = httpx2.AsyncHTTPTransport(limits=limits)
        return httpx2.AsyncClient(
            transport=transport,  # its own: proxies in the environment do not apply
            headers={"user-agent": "penstock", "accept": "image/*"},
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            trust_env=False,
        )


async def _bounded(response: httpx2.Response) -> bytes:
    """Return the body. Raises ImageError as soon as it is above the limit."""
    declared = response.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    if size <= MAX_IMAGE_BYTES:
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_IMAGE_BYTES:
                break
    if max(size, len(body)) > MAX_IMAGE_BYTES:
        raise ImageError(f"The image has more than the limit of {MAX_IMAGE_BYTES} bytes.")
    return bytes(body)
