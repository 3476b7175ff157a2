"""The limit on what of HTTP/1.1 is no content: heads, chunks, their extensions and trailers."""

from __future__ import annotations

from typing import Any

import h11

MAX_HEAD_BYTES = 65536  # request line and headers; also chunk extensions and trailers of a body
CHUNK_BYTES = 32  # of a chunk's size and line ends, which no client can leave out
# Each chunk costs time, however small it is. So a body may have MAX_CHUNKS, and one more for each
# CHUNK_CONTENT bytes of content.
MAX_CHUNKS, CHUNK_CONTENT = 1 << 16, 64


class BoundedConnection(h11.Connection):
    """The server's side of h11, with a limit that does not depend on packets.

    h11 compares its limit with incomplete heads only, so a head that arrives in one read passes.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._framing = 0  # bytes of the unfinished event
        self._extensions = 0  # bytes of the chunk extensions and trailers of a request
        self._chunks = self._content = 0  # of a request, and their bytes

    def next_event(self) -> Any:
        """Return h11's next event. Raises RemoteProtocolError, with 431 beyond the limit."""
        buffered = len(self._receive_buffer)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError:
            self._check(buffered - len(self._receive_buffer))  # or the message quotes all of it
            raise
        self._framing += buffered - len(self._receive_buffer)
        if isinstance(event, h11.Request):
            self._check(self._framing)
            self._framing = self._extensions = self._chunks = self._content = 0
        elif isinstance(event, h11.Data | h11.EndOfMessage):
            content = len(event.data) if isinstance(event, h11.Data) else 0
            self._extensions += max(0, self._framing - content - CHUNK_BYTES)
            self._framing = 0
            self._content += content
            if isinstance(event, h11.Data) and event.chunk_start:
                self._chunks += 1
                if self._chunks > MAX_CHUNKS + self._content // CHUNK_CONTENT:
                    raise h11.RemoteProtocolError("the body has too many small chunks")
        self._check(self._framing)
        self._check(self._extensions)
        return event

    def _check(self, size: int) -> None:
        if size > MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError("too many bytes of framing", error_status_hint=431)
