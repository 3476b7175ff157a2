"""/v1/batches: many requests in a file, answered behind all other requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.batch.batches import BatchRecord, new_batch
from server.batch.file_routes import batches_of, listing, page_of
from server.batch.runner import BatchRunner
from server.batch.schemas import BatchBody, BatchQuery
from server.batch.storage_errors import storing
from server.http.body import ignored_header, read_body
from server.http.errors import NO_RETRY, ApiError
from server.http.openapi import body_schema
from server.http.query import query_schema, read_query
from server.state import AppState, state_of

CANCELLABLE = ("validating", "in_progress", "cancelling")

router = APIRouter()


def batch_object(state: AppState, batch: BatchRecord) -> dict[str, Any]:
    """Return OpenAI's batch object. Fields without a value are left out, as its schema demands."""
    written: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": state.names[0],
        "errors": None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
    }
    if batch.problems:
        data = []
        for problem in batch.problems:
            fields = ("code", "message", "param", "line")
            data.append({name: getattr(problem, name) for name in fields})
        written["errors"] = {"object": "list", "data": data}
    for status, time in batch.times.items():
        written[f"{status}_at"] = time
    shown = {name: value for name, value in written.items() if value is not None}
    return shown | {"metadata": batch.metadata}


@router.post("/v1/batches", openapi_extra=body_schema(BatchBody))
async def create_batch(request: Request) -> Response:
    """Answer the lines of an uploaded file."""
    state = state_of(request)
    batches = batches_of(request)
    storage = batches.storage
    body = await read_body(request, BatchBody, state.body_turn)
    state.model_name(body.model)  # raises if the request names another model
    with storing():
        await storage.delete_expired()
    tenant = request.state.tenant
    file = storage.files.find(body.input_file_id, tenant)
    if file is None or file.purpose != "batch":
        text = "There is no file with this id and the purpose batch."
        raise ApiError(404, "not_found", text, param="input_file_id")
    if not storage.batches.has_room(tenant):
        text = (
            "Too many batches are unfinished, in all or of this key: cancel some, or retry later."
        )
        raise ApiError(429, "too_many_batches", text, headers={"retry-after": "60"})
    lifetime = body.output_expires_after.seconds if body.output_expires_after else None
    batch = new_batch(
        tenant, body.endpoint, file.id, metadata=body.metadata, output_lifetime=lifetime
    )
    with storing():
        await storage.batches.add(batch)
    batches.run(batch)
    return JSONResponse(batch_object(state, batch), headers=ignored_header(body.ignored))


@router.get("/v1/batches", openapi_extra=query_schema(BatchQuery))
async def list_batches(request: Request) -> Response:
    """List the batches, the newest first."""
    state = state_of(request)
    batches = batches_of(request)
    query, headers = read_query(request, BatchQuery)
    found = batches.storage.batches.owned(request.state.tenant)[::-1]
    shown, has_more = page_of(found, query.after, query.limit)
    data = [batch_object(state, batches.current(batch)) for batch in shown]
    return JSONResponse(listing(data, has_more), headers=headers)


def _batch(request: Request, batch_id: str) -> tuple[BatchRunner, BatchRecord]:
    """Return a batch of the request's owner. Raises a 404 ApiError."""
    batches = batches_of(request)
    batch = batches.storage.batches.find(batch_id, request.state.tenant)
    if batch is None:
        raise ApiError(404, "not_found", "There is no batch with this id.", param="batch_id")
    return batches, batch


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Describe a batch."""
    batches, batch = _batch(request, batch_id)
    return batch_object(state_of(request), batches.current(batch))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Cancel a batch. Its results so far become files."""
    batches, batch = _batch(request, batch_id)
    if batch.status not in CANCELLABLE:
        text = f"The batch is {batch.status} and cannot be cancelled."
        raise ApiError(409, "batch_ended", text, headers=NO_RETRY)
    with storing():
        batch = await batches.cancel(batch)
    return batch_object(state_of(request), batches.current(batch))
