"""Addresses of images: what is fetched, and from where."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.images import addresses
from server.images.addresses import ImageAddresses, read_entry
from server.images.errors import ImageError

BODY = b"picture" * 100
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
PUBLIC = "93.184.216.34"


@dataclass
class Site:
    """A server on 127.0.0.1 that sends `answer`, and the requests that it has read."""

    port: int
    requests: list[str] = field(default_factory=list)
    connections: int = 0


@contextlib.asynccontextmanager
async def site(
    answer: bytes = OK,
    then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Site]:
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.connections += 1
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            here.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(answer)
            await writer.drain()
            if then is not None:
                await then(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client or the test has ended
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    here = Site(0)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    here.port = server.sockets[0].getsockname()[1]
    async with server:
        yield here
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers)


class Resolver:
    """Answers with one list of IP addresses after the other, and with the last one again."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = answers
        self.names: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.names.append(host)
        return self.answers[min(len(self.names), len(self.answers)) - 1]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts that connections of the event loop go to. They must be IP addresses."""
    hosts: list[str] = []
    connect = asyncio.BaseEventLoop.create_connection

    async def recorded(self: object, factory: object, host: str, *rest: object, **more: object):  # type: ignore[no-untyped-def]
        hosts.append(host)
        return await connect(self, factory, host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", recorded)
    return hosts


async def refusal(fetched: ImageAddresses, url: str) -> str:
    with pytest.raises(ImageError) as error:
        await fetched.fetch(url)
    return str(error.value)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/a.png", "https://example.com/a.png", "http://169.254.169.254/latest"],
)
async def test_nothing_is_fetched_by_default(url: str, connections: list[str]) -> None:
    resolver = Resolver(["127.0.0.1"])
    message = await refusal(ImageAddresses((), resolver), url)
    assert "data: URL" in message
    assert "--image-hosts HOST[,HOST]" in message
    assert (resolver.names, connections) == ([], [])


async def test_image_of_a_listed_name_is_fetched_from_the_checked_address(
    connections: list[str],
) -> None:
    async with site() as here:
        resolver = Resolver(["127.0.0.1"], [PUBLIC], ["10.0.0.1"])
        entries = [f"pictures.example:{here.port}", "127.0.0.0/8"]
        url = f"http://pictures.example:{here.port}/a%20b.png?size=1#part"
        assert await ImageAddresses(entries, resolver).fetch(url) == BODY
    assert resolver.names == ["pictures.example"]
    assert connections == ["127.0.0.1"]
    request = here.requests[0].lower()
    assert request.startswith("get /a%20b.png?size=1 http/1.1\r\n")
    assert f"host: pictures.example:{here.port}\r\n" in request
    assert "accept-encoding: identity\r\n" in request
    assert "cookie" not in request
    assert "authorization" not in request


async def test_answer_of_dns_that_changes_leads_nowhere_else(connections: list[str]) -> None:
    """The second answer is private. It is refused, and the first connection never looks it up."""
    async with site() as here:
        resolver = Resolver(["127.0.0.1"], ["10.0.0.1"])
        entries = [f"pictures.example:{here.port}", "127.0.0.1"]
        fetched = ImageAddresses(entries, resolver)
        url = f"http://pictures.example:{here.port}/"
        assert await fetched.fetch(url) == BODY
        assert "not public" in await refusal(fetched, url)
    assert connections == ["127.0.0.1"]
    assert here.connections == 1


async def test_listed_address_with_a_port_allows_a_name_that_port_only(
    connections: list[str],
) -> None:
    async with site() as here:
        for port, is_allowed in ((here.port, True), (here.port - 1, False)):
            entries = [f"pictures.example:{here.port}", f"127.0.0.1:{port}"]
            fetched = ImageAddresses(entries, Resolver(["127.0.0.1"]))
            url = f"http://pictures.example:{here.port}/"
            if is_allowed:
                assert await fetched.fetch(url) == BODY
            else:
                assert "not public" in await refusal(fetched, url)
    assert connections == ["127.0.0.1"]


@pytest.mark.parametrize(
    "answer",
    [
        *(["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["100.64.0.1"], ["::1"], ["fd00::1"]),
        *(["::ffff:10.0.0.1"], ["64:ff9b::a00:1"], ["fe80::1%eth0"], [PUBLIC, "10.0.0.1"]),
        *(["0.0.0.0"], ["224.0.0.1"], ["not an address"]),
    ],
)
async def test_name_with_an_address_that_is_not_public_is_refused(
    answer: list[str], connections: list[str]
) -> None:
    fetched = ImageAddresses(["pictures.example"], Resolver(answer))
    message = await refusal(fetched, "https://pictures.example/a.png")
    assert message == "The host pictures.example has an address that is not public."
    assert connections == []


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("a.example", "https://b.example/"),
        ("a.example", "https://a.example.evil.org/"),
        ("a.example", "https://evil-a.example/"),
        ("a.example", "https://a.example:8080/"),
        ("a.example", "https://a.example:0/"),
        ("a.example", "https://a.example./"),
        ("a.example:8080", "https://a.example/"),
        ("*.a.example", "https://a.example/"),
        ("*.a.example", "https://evila.example/"),
        ("*.a.example", "https://.a.example.evil.org/"),
        ("a.example", "https://a.example@b.example/"),
        ("a.example", "https://b.example\\@a.example/"),
        ("a.example", "https://user:password@a.example/"),
        ("a.example", "https://10.0.0.1/"),
        ("10.0.0.1", "https://10.0.0.2/"),
        ("10.0.0.1", "https://0x0a.1/"),
        ("10.0.0.1", "https://167772161/"),
        ("a.example", "file:///etc/passwd"),
        ("a.example", "ftp://a.example/a.png"),
        ("a.example", "gopher://a.example/"),
        ("a.example", "//a.example/a.png"),
        ("a.example", "https:///a.png"),
        ("a.example", "https://a.example:99999/"),
        ("a.example", "https://a.exa\nmple/"),
        ("a.example", "https://a.example/" + "a" * 9000),
        ("a.example", "https://\ud800.example/"),
    ],
)
async def test_address_outside_the_list_is_refused(
    entry: str, url: str, connections: list[str]
) -> None:
    resolver = Resolver(["127.0.0.1"])
    message = await refusal(ImageAddresses([entry], resolver), url)
    assert len(message) < 300
    assert (resolver.names, connections) == ([], [])


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("a.example", "https://a.example/"),
        ("A.Example", "http://a.EXAMPLE:80/"),
        ("*.a.example", "https://x.a.example/"),
        ("*.a.example", "https://x.y.a.example/"),
        ("a.example:8080", "http://a.example:8080/"),
        ("10.0.0.0/8", "http://10.1.2.3/"),
        ("[fd00::1]:81", "http://[fd00::1]:81/"),
        ("[fd00::/8]", "http://[fd12::1]/"),
        ("xn--exmple-cua.com", "https://exämple.com/"),
        ("b.example,a.example:81", "https://a.example:81/"),
    ],
)
def test_address_in_the_list_passes_the_check_of_its_host(entry: str, url: str) -> None:
    checked = ImageAddresses([entry])._checked(url)
    assert checked.scheme in ("http", "https")


@pytest.mark.parametrize("entry", ["", "a:b", "https://a.example", "a.example:", "10.0.0.0/99"])
def test_entry_that_is_no_host_raises_config_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="--image-hosts"):
        read_entry(entry)


def reply(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


async def drip(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)


async def pour(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()


@pytest.mark.parametrize(
    ("answer", "then", "reason"),
    [
        (reply("302 Found", "Location: http://10.0.0.1/"), None, "redirect, which is not"),
        (reply("301 Moved", "Location: /b.png"), None, "redirect, which is not followed"),
        (reply("404 Not Found"), None, "status 404"),
        (reply("206 Partial Content"), None, "status 206"),
        (reply("200 OK", "Content-Encoding: gzip"), None, "compressed the image"),
        (reply("200 OK", "Content-Length: 99999999"), None, "more than the limit of 4096 bytes"),
        (reply("200 OK", "Content-Length: 5000") + b"x", None, "more than the limit of 4096"),
        (reply("200 OK"), pour, "more than the limit of 4096 bytes"),
        (reply("200 OK"), drip, "did not arrive from 127.0.0.1 within 0.4 s"),
        (b"HTTP/1.1 200 OK\r\nX: ", drip, "did not arrive from 127.0.0.1 within 0.4 s"),
        (b"", drip, "did not arrive from 127.0.0.1 within 0.4 s"),
        (reply("200 OK", "Content-Length: 100") + b"x", None, "transfer of the image .* failed"),
        (b"nonsense\r\n\r\n", None, "transfer of the image .* failed"),
        (b"", None, "transfer of the image .* failed"),
        (reply("200 OK", *(f"X{i}: {'x' * 9000}" for i in range(20))), None, "failed"),
    ],
)
async def test_answer_without_an_image_is_refused_with_the_reason(
    answer: bytes,
    then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "FETCH_S", 0.4)
    monkeypatch.setattr(addresses, "MAX_IMAGE_BYTES", 4096)
    async with site(answer, then) as here:
        fetched = ImageAddresses([f"127.0.0.1:{here.port}"])
        with pytest.raises(ImageError, match=reason):
            await fetched.fetch(f"http://127.0.0.1:{here.port}/")
        assert here.connections == 1


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(reply("404 Not Found")) as proxy, site() as here:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "")
        fetched = ImageAddresses([f"127.0.0.1:{here.port}"])
        assert await fetched.fetch(f"http://127.0.0.1:{here.port}/") == BODY
        assert proxy.connections == 0


async def test_next_address_of_the_host_is_tried_if_one_refuses() -> None:
    async with site() as here:
        resolver = Resolver(["127.0.0.2", "127.0.0.1"])  # nothing listens on the first one
        entries = [f"a.example:{here.port}", "127.0.0.0/8"]
        assert (
            await ImageAddresses(entries, resolver).fetch(f"http://a.example:{here.port}/") == BODY
        )


async def test_host_without_an_address_or_a_connection_is_named() -> None:
    async def fails(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    listed = ["a.example", "127.0.0.1"]
    assert await refusal(ImageAddresses(listed, fails), "http://a.example/") == (
        "The host a.example has no IP address."
    )
    async with site() as here:
        gone = here.port
    fetched = ImageAddresses([f"a.example:{gone}", "127.0.0.1"], Resolver(["127.0.0.1"]))
    assert await refusal(fetched, f"http://a.example:{gone}/") == (
        "No connection to a.example could be made."
    )


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a key, and a certificate for a.example that it signed itself."""
    file = tmp_path / "a.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", str(file), "-out", str(tmp_path / "cert.pem"), "-days", "2"),
            *("-subj", "/CN=a.example", "-addext", "subjectAltName=DNS:a.example"),
        ],
        check=True,
        capture_output=True,
    )
    with file.open("a", encoding="ascii") as key:
        key.write((tmp_path / "cert.pem").read_text(encoding="ascii"))
    return file


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
async def test_certificate_is_that_of_the_name_and_connections_are_not_shared(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both names have one IP address. A connection to the first would do for the second."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda connection, name, given: names.append(name)
    kept = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n" + OK.partition(b"\r\n")[2]

    async def wait(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)

    async with site(kept, wait, tls=context) as here:
        entries = [f"{name}.example:{here.port}" for name in "ab"]
        fetched = ImageAddresses([*entries, "127.0.0.1"], Resolver(["127.0.0.1"]))
        assert await fetched.fetch(f"https://a.example:{here.port}/") == BODY
        message = await refusal(fetched, f"https://b.example:{here.port}/")
        assert message == "No connection to b.example could be made."
        assert len(here.requests) == 1
    assert names == ["a.example", "b.example"]
