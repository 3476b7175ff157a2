"""GET /ui/api/requests: recorded requests, and why one of them took its time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.glassbox.access import glassbox_for_ui
from server.glassbox.requests.report import Reader, report, running, summary
from server.glassbox.requests.step_log import OpenRequest, RecordedRequest, Recorder
from server.glassbox.requests.step_model import fit
from server.glassbox.requests.trace_events import trace_events
from server.glassbox.requests.waterfall import waterfall_of
from server.http.auth import is_admin
from server.http.compression import json_response
from server.http.errors import ApiError, invalid

PATIENCE, POLL = 1.0, 0.02  # seconds that a running request is waited for, and between looks

router = APIRouter()


@router.get("/ui/api/requests")
async def recorded_requests(request: Request) -> dict[str, Any]:
    """List the recorded requests, the newest first: the caller's, with an admin key all.

    A request is recorded if it carries the header `X-Penstock-UI`, or arrives while one that does
    is running. The last 64 are kept.
    """
    recorder, now = glassbox_for_ui(request).recorder, time.monotonic()
    ended = [summary(one, now) for one in recorder.requests if _may_see(request, one.opened)]
    opened = [running(one, now) for one in recorder.open_requests if _may_see(request, one)]
    return {"requests": sorted(ended + opened, key=lambda entry: float(entry["age_ms"]))}


@router.get("/ui/api/requests/{request_id}")
async def waterfall(request: Request, request_id: str) -> Response:
    """Return the parts of a request's wall time, who cost what, and its steps.

    `request_id` is the `x-request-id` of its response. With `?format=trace` the answer is trace
    events, which Perfetto reads.
    """
    recorder = glassbox_for_ui(request).recorder
    form = request.query_params.get("format", "json")
    if form not in ("json", "trace"):
        raise invalid("format", f"format is {form[:32]!r}; supported: json, trace.")
    found = await _ended(request, recorder, request_id)
    reader = reader_of(request, recorder)
    steps, for_fit = recorder.steps_of(found), recorder.steps_for_fit()

    def answer() -> Response:
        model = fit(for_fit)
        document = report(found, waterfall_of(found, steps, model), model, reader)
        if form == "trace":
            document = trace_events(found, document)
        return json_response(request, document, headers)

    headers = {}
    if form == "trace":
        headers["content-disposition"] = f'attachment; filename="{request_id}.trace.json"'
    return await asyncio.to_thread(answer)


def _may_see(request: Request, opened: OpenRequest) -> bool:
    return is_admin(request) or opened.tenant == request.state.tenant


async def _ended(request: Request, recorder: Recorder, request_id: str) -> RecordedRequest:
    """Return the record of a request; of one that is about to end, after a short wait.

    The record of a stream is complete a moment after the client has read its last byte.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return _found(request, recorder, request_id)
        except ApiError as error:
            if error.status != 409 or time.monotonic() > deadline:
                raise
        await asyncio.sleep(POLL)


def _found(request: Request, recorder: Recorder, request_id: str) -> RecordedRequest:
    """Return the newest request with this id that the caller may see. Raises a 404 ApiError.

    Clients choose their ids, so two of them may have the same.
    """
    for one in reversed(recorder.requests):
        if one.opened.request_id == request_id and _may_see(request, one.opened):
            return one
    for opened in recorder.open_requests:
        if opened.request_id == request_id and _may_see(request, opened):
            message = f"The request {request_id} has not ended yet."
            raise ApiError(409, "request_running", message)
    message = (
        f"No request {request_id[:128]!r} is recorded. Requests are recorded if they carry the "
        "header X-Penstock-UI, or run at the same time as one that does; the last 64 are kept."
    )
    raise ApiError(404, "not_found", message)


def reader_of(request: Request, recorder: Recorder) -> Reader:
    """Return which requests the caller may see, and their names."""
    names: dict[int, str] = {}
    for opened in (*[one.opened for one in recorder.requests], *recorder.open_requests):
        if _may_see(request, opened):
            names |= dict.fromkeys(opened.ids, opened.request_id)
    return Reader(is_admin(request), names)
