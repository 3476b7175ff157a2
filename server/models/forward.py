"""Forward a request to the server of its model, and the answer back, byte by byte.

The body is read once, for the name of the model, and is sent on as it came.
"""

from __future__ import annotations

import asyncio

import orjson
from starlette.types import Message, Receive, Scope, Send

from server.http.disconnect import cancel_on_disconnect
from server.http.errors import ANTHROPIC_PATH, ApiError, ClientGone, StreamBroken
from server.models.catalog import ModelSpec
from server.models.client_connection import ChunkWriter, writer_of
from server.models.pool import Instance, ModelPool
from server.models.upstream import Connection, ConnectionLost, Head, RawHeaders, request_head

# Headers of the connection, and those that the forwarder writes itself.
NOT_FORWARDED = frozenset(
    {
        *(b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"),
        *(b"transfer-encoding", b"content-length", b"expect", b"x-request-id"),
    }
)
EVENT_STREAM = b"text/event-stream"
WAITED = b"x-model-wait-ms"  # how long a request waited for its model to load


class Forwarder:
    """Sends requests to the models of a pool."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    async def forward(
        self, spec: ModelSpec, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request whose body has been read.

        Raises ApiError if the model cannot be loaded or ends before its answer begins, StreamBroken
        if it ends later, and ClientGone.
        """
        instance, waited = await self._lease(spec, receive)
        try:
            await self._exchange(instance, body, waited, scope, receive, send)
        finally:
            self._pool.release(instance)

    async def forward_upload(
        self, spec: ModelSpec, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request whose body is sent on as it arrives. Raises as `forward`."""
        instance = await self._pool.lease(spec)
        try:
            connection = await _connect(instance, fresh=True)
            try:
                await _send_upload(connection, scope, receive)
                await _answer(connection, None, scope, receive, send)
            except ConnectionLost:
                raise ended(spec) from None
            finally:
                connection.close()
        finally:
            self._pool.release(instance)

    async def _lease(self, spec: ModelSpec, receive: Receive) -> tuple[Instance, float | None]:
        """Return the loaded model, and the seconds that the request waited for its load."""
        found = self._pool.instances.get(spec.name)
        if found is not None and found.state == "loaded" and found.is_open.is_set():
            return await self._pool.lease(spec), None  # the usual case needs no task
        began = asyncio.get_running_loop().time()
        instance = await cancel_on_disconnect(receive, self._pool.lease(spec))
        return instance, asyncio.get_running_loop().time() - began

    async def _exchange(
        self,
        instance: Instance,
        body: bytes,
        waited: float | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        headers = forwarded_headers(scope)
        if body or scope["method"] == "POST":
            headers.append((b"content-length", str(len(body)).encode()))
        request = request_head(scope["method"], target_of(scope), headers) + body
        connection = await _connect(instance)
        try:
            connection.begin(request, has_body=scope["method"] != "HEAD")
            try:
                await _answer(connection, waited, scope, receive, send)
            except ConnectionLost:
                # A kept connection may end just before it is used again.
                if not connection.was_used or connection.has_answered:
                    raise
                connection = await _connect(instance, fresh=True)
                connection.begin(request, has_body=scope["method"] != "HEAD")
                await _answer(connection, waited, scope, receive, send)
        except ConnectionLost:
            raise ended(instance.spec) from None
        finally:
            assert instance.upstream is not None
            instance.upstream.give_back(connection)


async def _connect(instance: Instance, *, fresh: bool = False) -> Connection:
    """Return a connection to a model. Raises ApiError if its server has ended."""
    assert instance.upstream is not None
    try:
        return await instance.upstream.connect(fresh=fresh)
    except OSError:
        raise ended(instance.spec) from None


async def _answer(
    connection: Connection, waited: float | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the answer on as it comes. Raises ConnectionLost before it began, and as `forward`."""
    client = asyncio.ensure_future(_disconnect(receive, connection))
    try:
        head = await connection.head()
        await send(_start_of(head, waited))
        try:
            await _send_body(connection, head, scope, send)
        except ConnectionLost:
            if not client.done():
                await _break_off(head, scope, send)
            raise ClientGone from None
    except ConnectionLost:
        if client.done():
            raise ClientGone from None
        raise
    finally:
        client.cancel()


async def _send_body(connection: Connection, head: Head, scope: Scope, send: Send) -> None:
    """Send the body on. Raises ConnectionLost."""
    writer = writer_of(scope)
    is_stream = head.length is None
    more = True
    while more:
        part, more = await connection.body()
        await send({"type": "http.response.body", "body": part, "more_body": more})
        if more and is_stream and writer is not None:
            await _pour(connection, writer)
            await send({"type": "http.response.body"})
            return


async def _pour(connection: Connection, writer: ChunkWriter) -> None:
    """Write the chunks of a stream as they come; read no more while the client reads too slowly."""
    waiting: asyncio.Task[None] | None = None

    async def resume_later() -> None:
        nonlocal waiting
        await writer.drain()
        waiting = None
        connection.resume()

    def sink(chunks: bytes) -> None:
        nonlocal waiting
        writer.write(chunks)
        if writer.is_full and waiting is None:
            connection.pause()
            waiting = asyncio.create_task(resume_later())

    try:
        await connection.pour(sink)
    finally:
        if waiting is not None:
            waiting.cancel()


async def _disconnect(receive: Receive, connection: Connection) -> None:
    """Close the connection to the model when the client leaves, which aborts the request."""
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
    connection.close()


async def _break_off(head: Head, scope: Scope, send: Send) -> None:
    """End an answer that the model began. Raises StreamBroken."""
    error = ApiError(503, "engine_unavailable", "The process of this model has ended.")
    if dict(head.headers).get(b"content-type", b"").startswith(EVENT_STREAM):
        data = error.body(scope["state"]["request_id"], scope["path"])
        event = b"event: error\n" if ANTHROPIC_PATH.fullmatch(scope["path"]) else b""
        event += b"data: " + data + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})
        raise StreamBroken(error)
    if head.length is None:  # newline-delimited JSON, or a document that breaks off
        data = orjson.dumps({"error": error.message}) + b"\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})
    raise error


def _start_of(head: Head, waited: float | None) -> Message:
    headers = head.headers
    if head.length is not None and not any(name == b"content-length" for name, _ in headers):
        headers = [*headers, (b"content-length", str(head.length).encode())]
    if waited is not None:
        headers = [*headers, (WAITED, str(round(waited * 1000)).encode())]
    return {"type": "http.response.start", "status": head.status, "headers": headers}


async def _send_upload(connection: Connection, scope: Scope, receive: Receive) -> None:
    headers = forwarded_headers(scope)
    length = dict(scope["headers"]).get(b"content-length")
    if length is not None:
        headers.append((b"content-length", length))
    else:
        headers.append((b"transfer-encoding", b"chunked"))
    connection.begin(request_head(scope["method"], target_of(scope), headers), has_body=True)
    more = True
    while more and not connection.has_answered:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        try:
            if part:
                connection.send(part if length is not None else b"%x\r\n%b\r\n" % (len(part), part))
            await connection.drain()
        except ConnectionLost:
            return  # `_answer` finds out whether there is an answer
    if length is None and not more:
        connection.send(b"0\r\n\r\n")


def forwarded_headers(scope: Scope) -> RawHeaders:
    """Return the headers of a request that the model sees, with the request's id."""
    kept = [(name, value) for name, value in scope["headers"] if name not in NOT_FORWARDED]
    return [*kept, (b"x-request-id", scope["state"]["request_id"].encode())]


def target_of(scope: Scope) -> bytes:
    """Return the path and query of a request, without the parameter `model`."""
    query: bytes = scope["query_string"]
    if b"model=" in query:
        query = b"&".join(part for part in query.split(b"&") if not part.startswith(b"model="))
    raw: bytes = scope["raw_path"]
    return raw + b"?" + query if query else raw


def ended(spec: ModelSpec) -> ApiError:
    """Return the error of a request whose model ended before the answer began."""
    text = f"The process of {spec.name} has ended; the next request loads it again."
    return ApiError(503, "engine_unavailable", text, headers={"retry-after": "1"})
