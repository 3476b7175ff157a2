"""Read a request, hash its prefix, and relay the answer of the replica that the router chose.

The ingress has no model and no tokenizer; the replicas implement the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deploy.ray.policies import prefix_of
from server.http.body import BODY_DEADLINE
from server.http.errors import ANTHROPIC_PATH, ApiError

SCRAPE_S = 5.0
# Keys of the ASGI scope that are sent to the replica. The others are specific to Ray.
CARRIED = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)

log = structlog.get_logger("deploy.ray")


class Ingress:
    """`block_size` is that of the KV cache. Reading stops if a body exceeds `max_body_bytes`."""

    def __init__(self, replicas: DeploymentHandle, block_size: int, max_body_bytes: int) -> None:
        self._replicas = replicas
        self._answers = replicas.options(method_name="answer", stream=True)
        self._block_size = block_size
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/metrics" and request.method == "GET":
            return await self._metrics(request.scope)
        try:
            async with asyncio.timeout(BODY_DEADLINE):
                body = await self._read(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except TimeoutError:
            message = f"The request body did not arrive within {BODY_DEADLINE:.0f} seconds."
            return refusal(ApiError(408, "request_timeout", message), request.scope)
        return Relay(self._answers, body, prefix_of(body, self._block_size))

    async def _read(self, request: Request) -> bytes:
        """Return the body, cut above the limit: the replica then refuses it as too long."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                break
        return bytes(body)

    async def _metrics(self, scope: Scope) -> Response:
        """Return the series of all replicas; the label `engine` is the rank of the replica.

        If a replica refuses the client, return its refusal.
        """
        replies = self._replicas.broadcast("scrape", carried(scope))
        found = await replies.results_async(timeout_s=SCRAPE_S, return_exceptions=True)
        expositions: dict[int, str] = {}
        for rank, (start, *rest) in (each for each in found if isinstance(each, tuple)):
            body = b"".join(message.get("body", b"") for message in rest)
            if start["status"] != 200:
                headers = dict(Headers(raw=without_request_id(start)["headers"]))
                return Response(body, start["status"], headers)
            expositions[rank] = body.decode()
        return Response(merged(expositions), headers={"content-type": CONTENT_TYPE_LATEST})


class Relay(Response):
    """Relay a replica's answer, message by message.

    If the replica is lost before its first message, send a 503. Otherwise end the body with an
    error event, as `penstock serve` does.
    """

    def __init__(self, answers: DeploymentHandle, body: bytes, prefix: list[bytes]) -> None:
        self._answers, self._body, self._prefix = answers, body, prefix
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = complete = False
        messages = self._answers.remote(carried(scope), self._body, prefix=self._prefix)
        try:
            async for batch in messages:
                for message in batch:
                    begun, complete = True, ends(message)
                    await send(without_request_id(message))
        except RayError as error:
            log.warning("replica lost", cause=type(error).__name__)
            response = refusal(lost(), scope)
            if not begun:
                await response(scope, receive, send)
                return
            event = b"data: " + bytes(response.body) + b"\n\n"
            if ANTHROPIC_PATH.fullmatch(scope["path"]):
                event = b"event: error\n" + event
            await send({"type": "http.response.body", "body": event})
            complete = True
        finally:
            messages.cancel()
        if not complete:
            raise ConnectionAbortedError("the replica ended its answer too early")


def carried(scope: Scope) -> Scope:
    return {key: scope[key] for key in CARRIED if key in scope}


def refusal(error: ApiError, scope: Scope) -> Response:
    """Return an error in the API's format, with the request id that Ray assigned."""
    body = error.body(Headers(scope=scope).get("x-request-id", "unknown"), scope["path"])
    return Response(body, error.status, error.headers, "application/json")


def ends(message: Message) -> bool:
    """Return whether an ASGI message is the last of its answer."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def without_request_id(message: Message) -> Message:
    """Remove x-request-id from a message, because Ray's proxy adds this header itself."""
    if message["type"] != "http.response.start":
        return message
    kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
    return {**message, "headers": kept}


def lost() -> ApiError:
    """Return the error for a request whose replica ended. A retry goes to another replica."""
    message = "The replica that processed this request has ended. Send it again."
    return ApiError(503, "engine_unavailable", message, headers={"retry-after": "1"})


def merged(expositions: Mapping[int, str]) -> bytes:
    """Merge the metrics of replicas, by rank, into one exposition with the label `engine`."""
    families: dict[str, Metric] = {}
    for rank, text in sorted(expositions.items()):
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "engine": str(rank)}
                whole.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(Families(families.values()))
    return generate_latest(registry)


class Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
