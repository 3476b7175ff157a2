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
from collections.abc import Sequence

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineUnavailableError
from server.config import ServerConfig
from server.http.access_log import AccessRecord, forwarded_for, log
from server.http.auth import OPEN_PATHS, is_page
from server.http.counts import HasState, RequestCounts
from server.http.errors import ApiError, ClientGone, StreamBroken, to_api_error
from server.http.rate_limits import RATE_LIMIT_HEADERS

ABSOLUTE_FORM = re.compile(r"(?i:https?)://(?P<host>[^/?#]+)(?P<path>/.*)?", re.DOTALL)
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PROBED_PATHS = OPEN_PATHS | {"/metrics"}
LOCALHOST = "localhost"  # in --allowed-origins
LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
LINGER = 5.0  # seconds to keep reading a body that is refused

# Headers that scripts of web pages may read. docs/clients.md says what they mean.
RESPONSE_HEADERS = (
    "x-request-id",
    "request-id",
    "openai-processing-ms",
    "server-timing",
    "openai-version",
    "x-ignored-params",
    "x-adjusted-params",
    "retry-after",
    "x-should-retry",
    *RATE_LIMIT_HEADERS,
)


class CrossOrigin(CORSMiddleware):
    """Middleware that admits web pages of --allowed-origins (CORS, as in the Fetch standard).

    `localhost` there is every origin of a loopback host, with any port.

    A page sends its key in the Authorization header; cookies are not allowed.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], metrics: RequestCounts) -> None:
        self._metrics = metrics
        super().__init__(
            app,
            allow_origins=[origin for origin in origins if origin != LOCALHOST],
            allow_origin_regex=LOOPBACK if LOCALHOST in origins else None,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,  # from a public page to a private network
            expose_headers=RESPONSE_HEADERS,
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
    reaches the client or uvicorn's log. Requests of probes, of files of the pages, and for `polled`
    paths are logged at debug level and not counted.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        client: HasState,
        metrics: RequestCounts,
        polled: Sequence[re.Pattern[str]],
    ) -> None:
        self._app = app
        self._config = config
        self._client = client
        self._metrics = metrics
        self._polled = polled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _below_root(_in_origin_form(scope), self._config.root_path)
        exchange = Exchange(
            self._client,
            self._config.max_body_bytes,
            scope,
            receive,
            send,
            is_probe=self._is_probe(scope["path"]),
        )
        try:
            await self._app(exchange.routed_scope, exchange.receive, exchange.send)
        except ClientGone:
            pass
        except StreamBroken:
            exchange.cut = 503 if self._client.state == "draining" else 500
            # End the body without the exchange, which would count the response as complete.
            await send({"type": "http.response.body"})
        except asyncio.CancelledError:  # uvicorn cancels requests that outlast the drain
            exchange.cut = 503
            exchange.is_body_complete = True  # there is no time to read the rest of the body
            await self._refuse(EngineUnavailableError("draining", "cut"), exchange, scope)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of a Rust library is no Exception
            await self._refuse(error, exchange, scope)
        finally:
            self._account(exchange)

    def _is_probe(self, path: str) -> bool:
        if path in PROBED_PATHS or is_page(path):
            return True
        return any(pattern.fullmatch(path) for pattern in self._polled)

    def _account(self, exchange: Exchange) -> None:
        """Count and log a finished request. Sampling of the access log does not drop errors."""
        config, status = self._config, exchange.outcome
        if not exchange.is_probe:
            self._metrics.request(status)
        if config.access_log and (status >= 400 or random.random() < config.access_log_sample):
            exchange.log()

    async def _refuse(self, error: BaseException, exchange: Exchange, scope: Scope) -> None:
        answer = to_api_error(error, draining=self._client.state == "draining")
        if answer.status == 500:
            log.error("request failed", code=answer.code, exc_info=error)
        if not exchange.is_probe:
            self._metrics.reject(answer.code)
        if not exchange.status:
            if answer.headers.get("connection") == "close":
                await exchange.read_on()
            body = answer.body(exchange.id, scope["path"])
            response = Response(body, answer.status, answer.headers, "application/json")
            await response(scope, exchange.receive, exchange.send)


def _in_origin_form(scope: Scope) -> Scope:
    """Return the scope of a request for `http://HOST/path` as one for `/path` with that Host.

    Servers must accept this form and ignore the Host header then (RFC 9112, section 3.2.2).
    """
    match = ABSOLUTE_FORM.fullmatch(scope["path"])
    if match is None:
        return scope
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    path = match["path"] or "/"
    headers = [(b"host", match["host"].encode()), *others]
    return {**scope, "path": path, "raw_path": path.encode(), "headers": headers}


def _below_root(scope: Scope, root: str) -> Scope:
    """Return the scope of a request for `root` + PATH as one for PATH (--root-path)."""
    path = scope["path"]
    if not root or not path.startswith(f"{root}/"):
        return scope
    raw = scope["raw_path"].removeprefix(root.encode())
    return {**scope, "path": path[len(root) :], "raw_path": raw}


def new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def answer_headers(request_id: str, milliseconds: int) -> dict[str, str]:
    """Return the headers that every response carries."""
    return {
        "x-request-id": request_id,
        "request-id": request_id,  # Anthropic's name
        "openai-processing-ms": str(milliseconds),
        "server-timing": f"total;dur={milliseconds}",
        "openai-version": "2020-10-01",
    }


class Exchange:
    """One request and its response, as RequestBoundary sees them."""

    def __init__(
        self,
        client: HasState,
        max_body: int,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        is_probe: bool,
    ) -> None:
        self._client, self._max_body = client, max_body
        self._scope, self._receive, self._send = scope, receive, send
        headers = Headers(scope=scope)
        # With `Expect: 100-continue` the client sends no body until `receive` is called
        # (RFC 9110, section 10.1.1).
        self.is_body_complete = headers.get("expect", "").lower() == "100-continue"
        self._arrival = time.monotonic()
        self.status = 0
        self.cut = 499  # logged status of an incomplete response: the client left
        self._complete = False
        self.is_probe = is_probe
        asked = headers.get("x-request-id", "")
        self.id = asked if REQUEST_ID.fullmatch(asked) else new_request_id()
        scope_state = scope.setdefault("state", {})
        scope_state.update(arrival=self._arrival, request_id=self.id, tenant="", limiter=None)
        # Gate changes them.
        scope_state.update(is_admin=False, may_prioritize=True, key_owner="")
        self._scope_state = scope_state
        # HEAD is served as GET (RFC 9110, section 9.3.2); uvicorn leaves out the body.
        self.routed_scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        self._record = AccessRecord(forwarded_for=forwarded_for(headers))
        if scope.get("client"):  # a line of a batch has none
            self._record.client = scope["client"][0]
        scope_state["access"] = self._record  # Gate and Submission add what they know
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=self.id)

    async def receive(self) -> Message:
        message = await self._receive()
        self.is_body_complete = not message.get("more_body")
        return message

    async def read_on(self) -> None:
        """Read a little more of a body before it is refused.

        Closing while the client still sends would reset the connection, and the client would not
        read the error. Stops after LINGER seconds or `max_body_bytes`.
        """
        left = self._max_body
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while left > 0 and not self.is_body_complete:
                    left -= len((await self.receive()).get("body", b""))

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            phases = headers.get("server-timing")
            headers.update(answer_headers(self.id, self._milliseconds()))
            if phases is not None:
                headers["server-timing"] = f"{phases}, {headers['server-timing']}"
            limiter = self._scope_state["limiter"]
            if limiter is not None:  # the key has limits: see Gate
                headers.update(limiter.headers())
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
        self._record.log(
            is_probe=self.is_probe,
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.outcome,
            ms=self._milliseconds(),
        )
