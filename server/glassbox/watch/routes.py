"""GET /ui/api/watch and /ui/api/blocks: the engine while it works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineDeadError
from engine.protocol.ready import Ready
from server.generation.sse import sse_event
from server.glassbox.access import state_for_ui
from server.glassbox.requests.report import Reader
from server.glassbox.requests.routes import reader_of
from server.glassbox.state import glassbox_of
from server.glassbox.watch.frames import FrameWriter, facts, snapshot_document, totals
from server.glassbox.watch.live_engine import MOST_VIEWERS, Snapshot, TooManyViewersError
from server.glassbox.watch.viewer import Lost, TracedStep, Viewer
from server.http.auth import is_admin
from server.http.compression import json_response
from server.http.errors import ApiError, invalid
from server.http.polled import PolledRoute
from server.state import AppState

PERIOD_S = 0.1  # between two frames
MOST_BYTES = 64 << 10  # of a frame

router = APIRouter(route_class=PolledRoute)


@router.get("/ui/api/watch")
async def watch(request: Request) -> Response:
    """Stream what the engine does, as server-sent events.

    The first event, `hello`, is the present state; each `frame` is what has happened since, at most
    ten times a second. With `?blocks=1` these are the steps, the requests that changed, and the
    events of KV blocks; without, all running requests and totals. A frame with `lost` says that the
    reader was too slow: it must get `/ui/api/blocks` again. The event `end` says why nothing more
    comes. At most 4 viewers are served, and 4 with admin keys; a key may have half of those free.
    """
    state = state_for_ui(request)
    info = state.loaded()
    asked = request.query_params.get("blocks", "0")
    if asked not in ("0", "1"):
        raise invalid("blocks", f"blocks is {asked[:32]!r}; supported: 0, 1.")
    return WatchResponse(state, request, info, with_blocks=asked == "1")


@router.get("/ui/api/blocks")
async def blocks(request: Request) -> Response:
    """Return the engine's own block tables, and which blocks the prefix cache finds.

    `seq` is the number of the frame that has the same state.
    """
    state = state_for_ui(request)
    info = state.loaded()
    glassbox = glassbox_of(request)
    snapshot = await glassbox.live.snapshot()
    reader = reader_of(request, glassbox.recorder)

    def answer() -> Response:  # takes tens of milliseconds for 100,000 blocks
        document = facts(info) | snapshot_document(glassbox.live, snapshot, reader)
        return json_response(request, document)

    return await asyncio.to_thread(answer)


class WatchResponse(EventSourceResponse):
    """A stream of frames for one viewer."""

    def __init__(
        self, state: AppState, request: Request, info: Ready, *, with_blocks: bool
    ) -> None:
        self._state = state
        self._glassbox = glassbox_of(request)
        self._request = request
        self._info = info
        self._with_blocks = with_blocks
        self._viewer: Viewer
        super().__init__(
            self._events(),
            headers={"cache-control": "no-cache"},
            ping=state.config.ping_interval,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            tenant, admin = self._request.state.tenant, is_admin(self._request)
            with self._glassbox.live.viewer(tenant, is_admin=admin) as self._viewer:
                await super().__call__(scope, receive, send)
        except TooManyViewersError:
            message = (
                f"At most {MOST_VIEWERS} viewers watch the engine, and a key has only its share of "
                "them: close one."
            )
            headers = {"retry-after": "10"}
            raise ApiError(503, "too_many_viewers", message, headers=headers) from None

    async def _events(self) -> AsyncIterator[bytes]:
        live, viewer = self._glassbox.live, self._viewer
        try:
            snapshot = await live.snapshot()
        except EngineDeadError:
            yield self._end()
            return
        viewer.begin(snapshot.number)
        yield await self._hello(snapshot)
        writer = FrameWriter(live)
        while not live.is_over:
            await asyncio.sleep(PERIOD_S)
            for found in viewer.take():
                yield self._frame(writer, found)
        yield self._end()

    def _frame(self, writer: FrameWriter, found: Lost | Sequence[TracedStep]) -> bytes:
        if not self._with_blocks:  # it needs nothing of earlier frames
            at = found.at if isinstance(found, Lost) else found[-1].trace.at
            return _event("frame", totals(self._glassbox.live, at, self._reader))
        if isinstance(found, Lost):
            return _event("frame", writer.lost(found.at))
        frame = _event("frame", writer.frame(found, self._reader))
        if len(frame) > MOST_BYTES:
            frame = _event("frame", writer.lost(time.monotonic()))
        return frame

    def _end(self) -> bytes:
        return _event("end", {"reason": self._state.client.state})

    async def _hello(self, snapshot: Snapshot) -> bytes:
        live, reader = self._glassbox.live, self._reader
        role = "admin" if is_admin(self._request) else "user"
        known = facts(self._info) | {"role": role}
        if not self._with_blocks:
            found = {"seq": snapshot.number, **totals(live, time.monotonic(), reader)}
            return _event("hello", known | found)
        return await asyncio.to_thread(
            lambda: _event("hello", known | snapshot_document(live, snapshot, reader))
        )

    @property
    def _reader(self) -> Reader:
        return reader_of(self._request, self._glassbox.recorder)


def _event(name: str, document: dict[str, Any]) -> bytes:
    return sse_event(orjson.dumps(document), name)
