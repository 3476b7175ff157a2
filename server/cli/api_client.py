"""The HTTP clients of commands that use a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from server.http.addresses import is_loopback


class ClientError(Exception):
    """An error that is shown to the user in one line."""


# No read timeout: the first token of a long prompt may take minutes on a busy server.
TIMEOUT = httpx2.Timeout(10, read=None, pool=None)


@dataclass(frozen=True)
class ServerAddress:
    """The URL of a server without /v1, and how a client connects to it."""

    url: httpx2.URL
    headers: dict[str, str]

    @property
    def is_here(self) -> bool:
        """Whether it is a loopback address, for which proxy settings are ignored.

        No proxy can reach it. Names are resolved by the proxy, not here.
        """
        return is_loopback(self.url.host, look_up=False)

    @property
    def uses_tls(self) -> bool:
        """Whether the environment is read for certificates, even for a loopback address."""
        return self.url.scheme == "https"


def server_address(url: str, key: str) -> ServerAddress:
    """Return the address that `url` means, with or without /v1. Raises ClientError."""
    if not (key.isascii() and key.isprintable()):
        raise ClientError(
            "The API key has characters that are not allowed in an HTTP header; "
            "correct --api-key or PENSTOCK_API_KEY."
        )
    full = url if "://" in url else f"http://{url}"
    try:
        address = httpx2.URL(full.rstrip("/").removesuffix("/v1"))
        address.host.encode("idna")
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise ClientError(f"{url}: {error}. Give --url one like http://127.0.0.1:8000.") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise ClientError(
            f"{url} is not the URL of a server; give --url one like http://127.0.0.1:8000."
        )
    return ServerAddress(address, {"Authorization": f"Bearer {key}"} if key else {})


@contextlib.contextmanager
def _environment_errors() -> Iterator[None]:
    """Raise ClientError if the environment keeps a client from being made."""
    try:
        yield
    except (httpx2.InvalidURL, ImportError, OSError, ValueError) as error:
        raise ClientError(
            "A proxy or certificate setting in the environment (HTTP_PROXY, HTTPS_PROXY, "
            f"ALL_PROXY, SSL_CERT_FILE) is not valid: {error}"
        ) from None


def async_client(
    url: str, key: str, connections: int, headers: Mapping[str, str] | None = None
) -> httpx2.AsyncClient:
    """Return a client of the server at `url` for many requests at a time. Raises ClientError.

    `headers` are sent with every request.
    """
    address = server_address(url, key)
    limits = httpx2.Limits(max_connections=connections)
    with _environment_errors():
        transport = None
        if address.is_here:
            transport = httpx2.AsyncHTTPTransport(
                limits=limits, verify=address.uses_tls, trust_env=address.uses_tls
            )
        return httpx2.AsyncClient(
            base_url=address.url,
            headers={**address.headers, **(headers or {})},
            timeout=TIMEOUT,
            limits=limits,
            transport=transport,
        )


class ApiClient:
    """A client of the server at `url`, with or without /v1.

    Raises ClientError if the URL, the key or a proxy setting cannot be used. Close it at the end.
    """

    def __init__(self, url: str, key: str) -> None:
        address = server_address(url, key)
        self.url = str(address.url)
        with _environment_errors():
            transport = None
            if address.is_here:
                # Reading the certificate store takes 20 ms.
                tls = address.uses_tls
                transport = httpx2.HTTPTransport(verify=tls, trust_env=tls)
            self.http = httpx2.Client(
                base_url=address.url,
                headers=address.headers,
                timeout=TIMEOUT,
                transport=transport,
            )

    def close(self) -> None:
        self.http.close()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise ClientError for each way in which a request can fail."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise ClientError(
                f"No server answers at {self.url} ({error}). Start one with `penstock serve`, "
                "or give the URL of another with --url."
            ) from None
        except httpx2.HTTPError as error:
            raise ClientError(f"The connection to {self.url} failed: {error}") from None
        except UnicodeEncodeError:
            raise ClientError("The input is not valid UTF-8 and cannot be sent.") from None


def document(response: httpx2.Response) -> dict[str, Any]:
    """Return the JSON object of a response. Raises ClientError with the server's message."""
    check(response)
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ClientError(f"{response.url} is no route of a Penstock server.")
    return found


def check(response: httpx2.Response) -> None:
    """Raise ClientError with the server's message unless the status is 200."""
    if response.status_code == 200:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    hint = " Set PENSTOCK_API_KEY or --api-key." if response.status_code == 401 else ""
    raise ClientError(f"The server returned {response.status_code}: {message}{hint}")
