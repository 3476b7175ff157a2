"""The HTTP client of commands that use a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx2

from server.http.listener import is_loopback


class ClientError(Exception):
    """An error that is shown to the user in one line."""


class ApiClient:
    """A client of the server at `url`, with or without /v1.

    Raises ClientError if the URL, the key or a proxy setting cannot be used. Close it at the end.
    """

    def __init__(self, url: str, key: str) -> None:
        full = url if "://" in url else f"http://{url}"
        self.url = full.rstrip("/").removesuffix("/v1")
        if not (key.isascii() and key.isprintable()):
            raise ClientError(
                "The API key has characters that are not allowed in an HTTP header; "
                "correct --api-key or PENSTOCK_API_KEY."
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No read timeout: the first token of a long prompt may take minutes on a busy server.
        timeout = httpx2.Timeout(10, read=None)
        with self.errors():
            address = httpx2.URL(self.url)
        try:
            address.host.encode("idna")
        except UnicodeError as error:
            raise ClientError(
                f"{url}: {error}. Give --url one like http://127.0.0.1:8000."
            ) from None
        if address.scheme not in ("http", "https") or not address.host:
            raise ClientError(
                f"{url} is not the URL of a server; give --url one like http://127.0.0.1:8000."
            )
        # No proxy can reach a loopback server, so proxy settings are ignored for it. With TLS the
        # environment is still read for certificates. Names are resolved by the proxy, not here.
        here, tls = is_loopback(address.host, look_up=False), address.scheme == "https"
        try:
            self.http = httpx2.Client(
                base_url=address,
                headers=headers,
                timeout=timeout,
                transport=httpx2.HTTPTransport(trust_env=tls) if here else None,
            )
        except (httpx2.InvalidURL, ImportError, OSError, ValueError) as error:
            raise ClientError(
                "A proxy or certificate setting in the environment (HTTP_PROXY, HTTPS_PROXY, "
                f"ALL_PROXY, SSL_CERT_FILE) is not valid: {error}"
            ) from None

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
        except httpx2.InvalidURL as error:
            raise ClientError(
                f"{self.url}: {error}. Give --url one like http://127.0.0.1:8000."
            ) from None
        except UnicodeEncodeError:
            raise ClientError("The input is not valid UTF-8 and cannot be sent.") from None


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
