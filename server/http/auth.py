"""Check a request before it is read: its host, its key, and the length of its body."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.client.shares import Shares
from server.config import ServerConfig
from server.http.addresses import address_of, is_loopback
from server.http.api_keys import ApiKeys
from server.http.errors import ApiError
from server.http.rate_limits import RateLimiter

INSIDE = "penstock.tenant"  # scope key of a request made in this process: the owner of its batch
# The built-in pages send it. A page of another origin cannot do so without a preflight, which is
# refused.
UI_HEADER = "x-penstock-ui"
PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip", "cf-connecting-ip", "true-client-ip"})
OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
UI, UI_DATA = "/ui", "/ui/api/"  # the pages, which hold no data; and what they ask for
UPLOAD_PATH = "/v1/files"  # its bodies are written to the disk as they arrive
FORM_BYTES = 64 << 10  # of an upload, in addition to its file


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


def is_forwarded(headers: Headers) -> bool:
    """Whether a proxy has forwarded a request: its client may be on another machine.

    The headers are those of RFC 7239 (Forwarded), RFC 9110 (Via) and of common proxies. A client
    that sends one itself only loses rights.
    """
    return any(name in PROXY_HEADERS or name.startswith("x-forwarded-") for name in headers)


def is_page(path: str) -> bool:
    """Whether a path is a file of the built-in pages, or leads to them. They need no key."""
    return path in ("/", UI) or (path.startswith(f"{UI}/") and not path.startswith(UI_DATA))


def is_admin(request: Request) -> bool:
    """Whether the request may see the requests of all clients: see --admin-key-file."""
    found = request.state.is_admin
    assert isinstance(found, bool)
    return found


def too_large(most: int, flag: str) -> ApiError:
    """Return the error for a body of more than `most` bytes, which `flag` limits."""
    text = f"The body is larger than {most} bytes, the limit of {flag}."
    return ApiError(413, "request_too_large", text, headers={"connection": "close"})


class Gate:
    """Middleware that checks Host header, API key, its limits and body size.

    It refuses with ApiError.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: ApiKeys) -> None:
        self._app = app
        self._max_body = config.max_body_bytes
        self._max_upload = config.max_upload_bytes + FORM_BYTES if config.batch_dir else 0
        # Bytes in the bodies of all open requests.
        self._bodies = Shares(max(MAX_BODIES * self._max_body, MIN_BODY_BUDGET))
        self._hosts = allowed_hosts(config.host)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_framing(headers)
            limiter = None
            if INSIDE in scope:  # a line of a batch, whose creation passed these checks
                limiter = self._identify(scope, self._keys.owner(scope[INSIDE]))
                scope["state"]["tenant"] = scope[INSIDE]
            elif scope["path"] not in OPEN_PATHS:
                self._check_host(headers)
                if not is_page(scope["path"]):
                    limiter = self._check_key(scope, headers)
            if scope["method"] in BODY_METHODS:
                app: ASGIApp = self._metered
                if self._max_upload and scope["path"] == UPLOAD_PATH:
                    self._check_length(headers, self._max_upload, "--max-upload-bytes")
                    app = self._app
                else:
                    self._check_length(headers, self._max_body, "--max-body-bytes")
                await self._limited(limiter, app, scope, receive, send)
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

    def _check_key(self, scope: Scope, headers: Headers) -> RateLimiter | None:
        """Return the limiter of the request's key, if the key has limits."""
        if not self._keys:
            # Behind a proxy, clients of a loopback server come from the network.
            scope["state"]["is_admin"] = not is_forwarded(headers)
            return None
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
        scope["state"]["is_admin"] = self._keys.is_admin(name)
        return self._identify(scope, name)

    def _identify(self, scope: Scope, name: str) -> RateLimiter | None:
        """Note whose request it is, and return the limiter of the key, if it has limits."""
        given = scope["state"]
        given["access"].key = self._keys.label(name)
        given.update(key_owner=name, tenant=self._keys.tenant(name))
        given["may_prioritize"] = self._keys.may_prioritize(name)
        return self._keys.limiter(name)

    async def _limited(
        self, limiter: RateLimiter | None, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a request within the limits of its key. RequestBoundary adds their headers."""
        if limiter is None:
            await app(scope, receive, send)
            return
        scope["state"]["limiter"] = limiter
        limiter.begin()
        try:
            await app(scope, receive, send)
        finally:
            limiter.end()

    def _check_framing(self, headers: Headers) -> None:
        """Refuse a request with two lengths, and close the connection (RFC 9112, section 6.1).

        A proxy that reads the other header would see a second request in the body.
        """
        if "content-length" in headers and "transfer-encoding" in headers:
            text = "A request must not have both Content-Length and Transfer-Encoding."
            raise ApiError(400, "invalid_http", text, headers={"connection": "close"})

    def _check_length(self, headers: Headers, most: int, flag: str) -> None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_large(most, flag)

    async def _metered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes of a body as they arrive.

        A chunked body has no length to check in advance. Many clients at once could also fill the
        memory with bodies that are each within the limit.
        """
        size = 0
        tenant = scope["state"]["tenant"]

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            part = len(message.get("body", b""))
            if size + part > self._max_body:
                raise too_large(self._max_body, "--max-body-bytes")
            if not self._bodies.may_take(tenant, part):
                raise self._bodies_full(tenant)
            size += part
            self._bodies.take(tenant, part)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._bodies.give_back(tenant, size)

    def _bodies_full(self, tenant: str) -> ApiError:
        held, most = self._bodies.held(tenant), self._bodies.capacity
        text = f"Open requests hold {self._bodies.total} of at most {most} bytes of bodies"
        if tenant:
            text += f", {held} of them with this API key, whose share this is"
        headers = {"retry-after": "5", "connection": "close"}
        return ApiError(503, "server_overloaded", f"{text}; retry later.", headers=headers)
