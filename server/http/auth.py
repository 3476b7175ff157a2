"""API keys: read them, and check the key of a request."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ConfigError
from server.cli.config import ServerConfig
from server.http.errors import ApiError
from server.http.listener import address_of, is_loopback


class ApiKeys:
    """SHA-256 digests of the keys of --api-key and --api-key-file.

    Without these settings, requests need no key. Raises ConfigError if the file contains no key,
    which would open the server to everyone, or if a client could not send one of the keys.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._digests = _digests(config)

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Read the file again. If that raises ConfigError, the keys are unchanged."""
        self._digests = _digests(self._config)

    def find(self, key: bytes) -> str | None:
        """Return a name for the owner of `key` (its hex digest), or None if the key is invalid.

        Compares all keys, so that the time taken reveals nothing about them.
        """
        given = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if any(matches) else None


def _digests(config: ServerConfig) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in read_keys(config)]


def read_keys(config: ServerConfig) -> list[str]:
    """Return all keys as text. Raises ConfigError if a key or the file is invalid."""
    keys = {f"--api-key, key {place}": key for place, key in enumerate(config.api_key, 1)}
    if config.api_key_file is not None:
        keys |= _keys_in(Path(config.api_key_file))
    for where, key in keys.items():
        if not key or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{where}: an API key must not be empty or contain white space; "
                "a comment in a key file needs a line of its own."
            )
    return list(keys.values())


def _keys_in(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the API keys in {file}: {error}") from error
    found = {f"{file}, line {number}": line.strip() for number, line in enumerate(lines, 1)}
    keys = {where: line for where, line in found.items() if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(f"{file} contains no API key; write one key per line.")
    return keys


OPEN_PATHS = frozenset({"/health", "/ready"})


# Limit of the bodies of all open requests: MAX_BODIES bodies of the largest size, and at least
# LEAST_FOR_BODIES bytes, because a body counts until its response has ended.
MAX_BODIES, MIN_BODY_BUDGET = 32, 256 << 20


BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


def allowed_hosts(host: str) -> frozenset[str]:
    """Return the host names that a server bound to `host` accepts; empty allows all names.

    A loopback server accepts local names only, because a web page could rebind its own name to
    127.0.0.1 (DNS rebinding). A server bound to the network accepts all names.
    """
    local = {"localhost", "127.0.0.1", "::1", host.strip("[]").lower(), str(address_of(host))}
    return frozenset(local if is_loopback(host) else ())


class Gate:
    """Middleware that checks Host header, API key and body size. It refuses with ApiError."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: ApiKeys) -> None:
        self._app = app
        self._max_body = config.max_body_bytes
        self._held = 0  # bytes in the bodies of all open requests
        self._most_held = max(MAX_BODIES * self._max_body, MIN_BODY_BUDGET)
        self._hosts = allowed_hosts(config.host)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_framing(headers)
            if scope["path"] not in OPEN_PATHS:
                self._check_host(headers)
                self._check_key(scope, headers)
            if scope["method"] in BODY_METHODS:
                self._check_length(headers)
                await self._metered(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        name = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]").lower()
        if self._hosts and name not in self._hosts:
            message = (
                "The server is bound to a loopback address and accepts only local names as Host. "
                "Make the proxy send `Host: localhost`, or bind to the network with --host."
            )
            raise ApiError(400, "invalid_host", message)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # Anthropic's clients
        name = self._keys.find(key.strip(" \t").encode("latin-1"))  # the bytes as sent
        if name is None:
            message = (
                "The API key is missing or invalid; send `Authorization: Bearer KEY` "
                "or `x-api-key: KEY`."
            )
            raise ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
        if len(self._keys) > 1:  # tenants must not see each other's prefixes in the cache
            scope["state"]["tenant"] = name

    def _check_framing(self, headers: Headers) -> None:
        """Refuse a request with two lengths, and close the connection (RFC 9112, section 6.1).

        A proxy that reads the other header would see a second request in the body.
        """
        if "content-length" in headers and "transfer-encoding" in headers:
            text = "A request must not have both Content-Length and Transfer-Encoding."
            raise ApiError(400, "invalid_http", text, headers={"connection": "close"})

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        text = f"The body is larger than {self._max_body} bytes, the limit of --max-body-bytes."
        return ApiError(413, "request_too_large", text, headers={"connection": "close"})

    async def _metered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes of a body as they arrive.

        A chunked body has no length to check in advance. Many clients at once could also fill the
        memory with bodies that are each within the limit.
        """
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            part = len(message.get("body", b""))
            size += part
            self._held += part
            if size > self._max_body:
                raise self._too_large()
            if self._held > self._most_held:
                text = f"Open requests hold over {self._most_held} bytes of bodies; retry later."
                headers = {"retry-after": "5", "connection": "close"}
                raise ApiError(503, "server_overloaded", text, headers=headers)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= size
