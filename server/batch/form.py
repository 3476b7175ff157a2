"""Read a form with one file (multipart/form-data, RFC 7578). The file is never held in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from server.http.auth import FORM_BYTES, too_large
from server.http.errors import ApiError, ClientGone

FORM = "multipart/form-data"
CHUNK_DEADLINE = 30.0  # seconds until the next bytes must arrive
FORM_DEADLINE = 900.0  # seconds until the whole form must have arrived
WRITTEN_BYTES = 256 << 10  # written to the disk at a time
MAX_FIELDS = 16
CLOSE = {"connection": "close"}  # otherwise the server would go on reading the body


@dataclass
class Form:
    """The fields of a form; `filename` is None if it has no file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


def malformed(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_form", message, param=param, headers=CLOSE)


class FormReader:
    """Takes the callbacks of the multipart parser and sorts the parts of the form."""

    def __init__(self) -> None:
        self.form = Form()
        self.pending = bytearray()  # bytes of the file that are not written yet
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._field = bytearray()
        self._field_bytes = 0
        self.is_complete = False

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        self._disposition = b""
        self._field = bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = b"filename" in options
        if not self._is_file:
            return
        if self._name != "file" or self.form.filename is not None:
            raise malformed("A form has one file, in the field `file`.", "file")
        self.form.filename = options[b"filename"].decode(errors="replace")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.pending += memoryview(data)[start:end]
            return
        self._field_bytes += end - start
        if self._field_bytes > FORM_BYTES:
            raise malformed(f"The fields of the form have more than {FORM_BYTES} bytes.")
        self._field += data[start:end]

    def _end(self) -> None:
        if self._is_file:
            return
        if len(self.form.fields) == MAX_FIELDS:
            raise malformed(f"The form has more than {MAX_FIELDS} fields.")
        self.form.fields[self._name] = self._field.decode(errors="replace")

    def _on_end(self) -> None:
        self.is_complete = True


async def read_form(
    request: Request, write: Callable[[bytes], None], most: int, origins: Collection[str]
) -> Form:
    """Return the form of a request; `write` is called with the bytes of its file, in a thread.

    `most` is the limit of the file in bytes. Raises ApiError, ClientGone, or what `write` raises.
    """
    chunks = _chunks(request)
    try:
        _check_page(request, origins)
        return await _read(chunks, _boundary(request), write, most)
    except Exception:
        await _discard(request, chunks, most)
        raise


async def discard_form(request: Request, most: int) -> None:
    """Read a form that is refused before `read_form`, at most `most` bytes of its file."""
    await _discard(request, _chunks(request), most)


async def _discard(request: Request, chunks: AsyncIterator[bytes], most: int) -> None:
    """Read the rest of a refused form, so that its client reads the error.

    Many clients read no response before they have sent the body. If the connection is reset, they
    send it again. A client that sends Expect reads the response first.
    """
    received = 0
    if "expect" in request.headers:
        return
    with contextlib.suppress(ApiError):  # the form stalls
        async for chunk in chunks:
            received += len(chunk)
            if received > most + FORM_BYTES:
                return


async def _read(
    chunks: AsyncIterator[bytes], boundary: bytes, write: Callable[[bytes], None], most: int
) -> Form:
    reader = FormReader()
    parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
    received = 0
    async for chunk in chunks:
        received += len(chunk)
        if received > most + FORM_BYTES:
            raise too_large(most, "--max-upload-bytes")
        try:
            parser.write(chunk)
        except FormParserError as error:
            raise malformed(f"The form is malformed: {error}.") from None
        if len(reader.pending) >= WRITTEN_BYTES:
            await asyncio.to_thread(write, bytes(reader.pending))
            reader.pending.clear()
    if not reader.is_complete:
        raise malformed("The form is cut off: its last boundary is missing.")
    await asyncio.to_thread(write, bytes(reader.pending))
    return reader.form


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != FORM.encode():
        text = f"The request needs `Content-Type: {FORM}`."
        raise ApiError(415, "unsupported_media_type", text, headers=CLOSE)
    if not 1 <= len(boundary) <= 70:  # RFC 2046, section 5.1.1
        raise malformed("The Content-Type needs a boundary of 1 to 70 characters.")
    return boundary


def _check_page(request: Request, origins: Collection[str]) -> None:
    """Refuse a form that a foreign web page sends.

    Browsers send forms without a preflight request, so CORS does not stop them.
    """
    origin = request.headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return
    if urlsplit(origin).netloc != request.headers.get("host", ""):
        text = "Web pages of other origins may not upload files: see --allowed-origins."
        raise ApiError(403, "not_allowed", text, headers=CLOSE)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body. Raises a 408 ApiError if it stalls, and ClientGone."""
    stream: Any = request.stream()
    try:
        async with asyncio.timeout(FORM_DEADLINE):
            while True:
                async with asyncio.timeout(CHUNK_DEADLINE):
                    chunk = await anext(stream, None)
                if chunk is None:
                    return
                yield chunk
    except TimeoutError:
        text = f"The form did not arrive: {CHUNK_DEADLINE:.0f} s without a byte, or too slow."
        raise ApiError(408, "request_timeout", text, headers=CLOSE) from None
    except ClientDisconnect:
        raise ClientGone from None
