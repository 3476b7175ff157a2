"""ASGI middleware between the network and the routes.

From the outside in: CrossOrigin (only with --allowed-origins), RequestBoundary, Gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineUnavailableError
from server.config import ServerConfig
from server.errors import ApiError, ClientGone, StreamBroken
from server.keys import ApiKeys
from server.listen import address_of, is_loopback
from server.service import Service

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready"})
PROBED_PATHS = OPEN_PATHS | {"/metrics"}  # probed every few seconds: logged at debug level
LINGER = 5.0  # seconds to keep reading a body that is refused
# Limit of the bodies of all open requests: MAX_BODIES bodies of the largest size, and at least
# LEAST_FOR_BODIES bytes, because a body counts until its response has ended.
MAX_BODIES, LEAST_FOR_BODIES = 32, 256 << 20
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})

log = structlog.get_logger("server.access")


class CrossOrigin(CORSMiddleware):
    """Middleware that admits web pages of --allowed-origins (CORS, as in the Fetch standard).

    A page sends its key in the Authorization header; cookies are not allowed.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._metrics = service.metrics
        super().__init__(
            app,
            allow_origins=service.config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,  # from a public page to a private network
            expose_headers=("x-request-id", "x-ignored-params", "retry-after", "x-should-retry"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response, request_id = super().preflight_response(request_headers), new_request_id()
        self._metrics.request(response.status_code)
        if response.status_code >= 400:
            self._metrics.reject("not_allowed")
            log.info("page refused", origin=request_headers["origin"][:128], request_id=request_id)
            text = f"{bytes(response.body).decode()}: see --allowed-origins."
            body = ApiError(400, "not_allowed", text).body(request_id)
            response = Response(body, 400, media_type="application/json")
        response.headers.update(answer_headers(request_id, 0))
        return response


class RequestBoundary:
    """Middleware that gives each request an id and handles every exception.

    An exception becomes a response or a closed connection. None passes further, so no traceback
    reaches the client or uvicorn's log.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(self._service, scope, receive, send)
        try:
            await self._app(exchange.routed, exchange.receive, exchange.send)
        except ClientGone:
            pass
        except StreamBroken:
            exchange.cut = 503 if self._service.client.state == "draining" else 500
            # End the body without the exchange, which would count the response as complete.
            await send({"type": "http.response.body"})
        except asyncio.CancelledError:  # uvicorn cancels requests that outlast the drain
            exchange.cut = 503
            exchange.all_read = True  # there is no time to read the rest of the body
            await self._refuse(EngineUnavailableError("draining", "cut"), exchange, scope)
        except Exception as error:
            await self._refuse(error, exchange, scope)
        finally:
            self._account(exchange)

    def _account(self, exchange: Exchange) -> None:
        """Count and log a finished request. Sampling of the access log does not drop errors."""
        config, status = self._service.config, exchange.outcome
        if not exchange.probed:
            self._service.metrics.request(status)
        if config.access_log and (status >= 400 or random.random() < config.access_log_sample):
            exchange.log()

    async def _refuse(self, error: Exception, exchange: Exchange, scope: Scope) -> None:
        answer = self._service.api_error(error)
        if answer.status == 500:
            log.error("request failed", code=answer.code, exc_info=error)
        if not exchange.probed:
            self._service.metrics.reject(answer.code)
        if not exchange.status:
            if answer.headers.get("connection") == "close":
                await exchange.read_on()
            body, kind = answer.body(exchange.id), "application/json"
            response = Response(body, answer.status, answer.headers, kind)
            await response(scope, exchange.receive, exchange.send)


def new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def answer_headers(request_id: str, milliseconds: int) -> dict[str, str]:
    """Return the headers that every response carries."""
    return {
        "x-request-id": request_id,
        "openai-processing-ms": str(milliseconds),
        "openai-version": "2020-10-01",
    }


class Exchange:
    """One request and its response, as RequestBoundary sees them."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._client, self._most = service.client, service.config.max_body_bytes
        self._scope, self._receive, self._send = scope, receive, send
        headers = Headers(scope=scope)
        # With `Expect: 100-continue` the client sends no body until `receive` is called
        # (RFC 9110, section 10.1.1).
        self.all_read = headers.get("expect", "").lower() == "100-continue"
        self._arrival = time.monotonic()
        self.status = 0
        self.cut = 499  # logged status of an incomplete response: the client left
        self._complete = False
        self.probed = scope["path"] in PROBED_PATHS
        asked = headers.get("x-request-id", "")
        self.id = asked if REQUEST_ID.fullmatch(asked) else new_request_id()
        state = scope.setdefault("state", {})
        state.update(arrival=self._arrival, request_id=self.id, tenant="")
        # HEAD is served as GET (RFC 9110, section 9.3.2); uvicorn leaves out the body.
        self.routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=self.id)

    async def receive(self) -> Message:
        message = await self._receive()
        self.all_read = not message.get("more_body")
        return message

    async def read_on(self) -> None:
        """Read a little more of a body before it is refused.

        Closing while the client still sends would reset the connection, and the client would not
        read the error. Stops after LINGER seconds or `max_body_bytes`.
        """
        left = self._most
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while left > 0 and not self.all_read:
                    left -= len((await self.receive()).get("body", b""))

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(answer_headers(self.id, self._milliseconds()))
            if self._client.state == "draining":
                headers["connection"] = "close"  # or the client's pool would reuse it
        elif not message.get("more_body"):
            self._complete = True
        await self._send(message)

    def _milliseconds(self) -> int:
        return round((time.monotonic() - self._arrival) * 1000)

    @property
    def outcome(self) -> int:
        """The status; for an incomplete response 499, 500 or 503, not the status already sent."""
        return self.status if self._complete else self.cut

    def log(self) -> None:
        write = log.debug if self.probed else log.info
        write(
            "request",
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.outcome,
            ms=self._milliseconds(),
        )


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
        self._most_held = max(MAX_BODIES * self._max_body, LEAST_FOR_BODIES)
        self._hosts = allowed_hosts(config.host)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
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
        name = self._keys.find(key.strip().encode("latin-1"))  # the bytes as sent
        if scheme.lower() != "bearer" or name is None:
            message = "The API key is missing or invalid; send `Authorization: Bearer KEY`."
            raise ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
        if len(self._keys) > 1:  # tenants must not see each other's prefixes in the cache
            scope["state"]["tenant"] = name

    def _check_length(self, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that reads the other header would see a second request in this body.
            text = "A request must not have both Content-Length and Transfer-Encoding."
            raise ApiError(400, "invalid_http", text, headers={"connection": "close"})
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
