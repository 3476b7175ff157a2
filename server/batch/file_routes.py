"""/v1/files: upload the input of a batch, and read its results."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import closing
from typing import Any, BinaryIO, Protocol, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.batch.files import FileStore, FileTooLarge, StoredFile, Upload
from server.batch.folder import StoreFull
from server.batch.form import Form, discard_form, read_form
from server.batch.runner import BatchRunner
from server.batch.schemas import HOUR, MONTH, UPLOAD_FORM, FileQuery
from server.batch.storage_errors import storing
from server.http.auth import too_large
from server.http.body import MAX_LISTED, UNPRINTABLE, ignored_header
from server.http.errors import NO_RETRY, ApiError, invalid
from server.http.openapi import RESPONSES
from server.http.query import query_schema, read_query
from server.state import state_of

UNWANTED = re.compile(r"[^\w. ()+-]")  # characters of a file name that are shown as _
NAME_LENGTH = 255
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
BINARY = "application/octet-stream"

router = APIRouter()


class Identified(Protocol):
    """An object of a list."""

    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=Identified)


def batches_of(request: Request) -> BatchRunner:
    """Return the runner of batches. Raises a 404 ApiError without --batch-dir."""
    batches: BatchRunner | None = request.app.state.batches
    if batches is None:
        text = "Files and batches are off: start the server with --batch-dir FOLDER."
        raise ApiError(404, "batches_off", text)
    return batches


def page_of(items: list[Item], after: str | None, limit: int) -> tuple[list[Item], bool]:
    """Return the items after the one with the id `after`, and whether more follow.

    Raises a 400 ApiError if there is no such item.
    """
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise invalid("after", "after is not the id of an object in this list.")
        items = items[places[0] + 1 :]
    return items[:limit], len(items) > limit


def listing(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list object. An empty list has empty ids."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": has_more,
    }


def file_object(file: StoredFile) -> dict[str, Any]:
    """Return OpenAI's file object."""
    written = {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    if file.expires_at is not None:
        written["expires_at"] = int(file.expires_at)
    return written


@router.post("/v1/files", openapi_extra=UPLOAD_FORM)
async def upload(request: Request) -> Response:
    """Upload a file for a batch (multipart/form-data)."""
    storage = batches_of(request).storage
    try:
        with storing():
            await storage.delete_expired()
            with closing(await _begin(request, storage.files)) as uploading:
                origins = state_of(request).config.allowed_origins
                most = storage.files.most_bytes
                form = await read_form(request, uploading.write, most, origins)
                name, lifetime = _checked(form)
                file = await asyncio.to_thread(uploading.finish, name, "batch", lifetime)
                await storage.files.add(file)
    except FileTooLarge as error:
        raise too_large(error.args[0], "--max-upload-bytes") from None
    unknown = [field for field in form.fields if field not in FIELDS][:MAX_LISTED]
    ignored = [UNPRINTABLE.sub("_", field[:64]) or "_" for field in unknown]
    return JSONResponse(file_object(file), headers=ignored_header(ignored))


async def _begin(request: Request, files: FileStore) -> Upload:
    try:
        return files.begin_upload(request.state.tenant)
    except (StoreFull, OSError):
        await discard_form(request, files.most_bytes)
        raise


def _checked(form: Form) -> tuple[str, float | None]:
    """Return the file's name and its lifetime in seconds. Raises ApiError.

    The name is only shown, never used as a path.
    """
    if form.filename is None:
        raise invalid("file", "file is missing.", "missing_required_parameter")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise invalid("purpose", "purpose is missing.", "missing_required_parameter")
    if purpose != "batch":
        raise invalid("purpose", "purpose must be batch.")
    last_part = re.split(r"[/\\]", form.filename)[-1]
    name = UNWANTED.sub("_", last_part)[:NAME_LENGTH] or "file.jsonl"
    return name, _lifetime(form)


def _lifetime(form: Form) -> float | None:
    anchor = form.fields.get("expires_after[anchor]")
    seconds = form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after.anchor", "expires_after[anchor] must be created_at.")
    number = int(seconds) if seconds and re.fullmatch(r"[0-9]{1,9}", seconds) else 0
    if not HOUR <= number <= MONTH:
        text = f"expires_after[seconds] must be a whole number from {HOUR} to {MONTH}."
        raise invalid("expires_after.seconds", text)
    return number


@router.get("/v1/files", openapi_extra=query_schema(FileQuery))
async def list_files(request: Request) -> Response:
    """List the files, the newest first."""
    files = batches_of(request).storage.files
    query, headers = read_query(request, FileQuery)
    found = files.owned(request.state.tenant)
    if query.purpose is not None:
        found = [file for file in found if file.purpose == query.purpose]
    if query.order == "desc":
        found.reverse()
    shown, has_more = page_of(found, query.after, query.limit)
    return JSONResponse(listing([file_object(file) for file in shown], has_more), headers=headers)


def _file(request: Request, file_id: str) -> tuple[BatchRunner, StoredFile]:
    """Return a file of the request's owner. Raises a 404 ApiError."""
    batches = batches_of(request)
    file = batches.storage.files.find(file_id, request.state.tenant)
    if file is None:
        raise _no_file()
    return batches, file


def _no_file() -> ApiError:
    return ApiError(404, "not_found", "There is no file with this id.", param="file_id")


class WholeFile(FileResponse):
    """The contents of an open file, which may be deleted meanwhile. Ignores the Range header."""

    def __init__(self, stream: BinaryIO, **facts: Any) -> None:
        super().__init__(stream.name, stat_result=os.fstat(stream.fileno()), **facts)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        with self._stream:
            await send({**start, "headers": self.raw_headers})
            part = b"first"
            while part:
                part = await asyncio.to_thread(self._stream.read, self.chunk_size)
                await send({"type": "http.response.body", "body": part, "more_body": bool(part)})


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> dict[str, Any]:
    """Describe a file."""
    _, file = _file(request, file_id)
    return file_object(file)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={**RESPONSES, 200: {"content": {BINARY: {}}}},
)
async def file_content(request: Request, file_id: str) -> Response:
    """Return the contents of a file."""
    batches, file = _file(request, file_id)
    path = batches.storage.files.contents(file)
    try:
        stream = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError:  # deleted since
        raise _no_file() from None
    headers = {"x-content-type-options": "nosniff", "accept-ranges": "none"}
    return WholeFile(stream, media_type=BINARY, filename=file.filename, headers=headers)


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """Delete a file that no unfinished batch needs."""
    batches, file = _file(request, file_id)
    if file.id in batches.storage.batches.needed_files():
        text = "An unfinished batch needs this file: cancel it first."
        raise ApiError(409, "file_in_use", text, headers=NO_RETRY)
    with storing():
        await batches.storage.files.delete(file)
    return {"id": file.id, "object": "file", "deleted": True}
